"""Statistics of experts: how often they are used and how large their outputs are.

Such statistics are said to predict which experts matter, and are used for pruning.

With T_e the tokens that use expert e, g its weight, f its output before the weight:

    frequency            |T_e| / tokens
    mean weight          mean over T_e of g
    mean norm            mean over T_e of |f|          ("MAN"; its sum over T_e is "EAN")
    REAP                 mean over T_e of g |f|        Lasby et al. 2025
    probability          mean over all tokens of the expert's score, scores summing to 1     EMO
    MoNE                 |std over T_e of f| times mean weight       Zhang et al. 2025

The weight is the one that the layer uses, renormalized and scaled as in the model.

Shapes: M tokens, R of them that use an expert, S experts of a layer, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyad.train.errors import ConfigError
from polyad.train.experts.information import Summed
from polyad.train.experts.probing import Decision, RoutedLayer

STATISTICS = ("frequency", "mean_weight", "mean_norm", "sum_norm", "reap", "mone")
"""The statistics of an expert, by their names in JSON."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Accumulated moments of a layer's experts, on the CPU in float64."""

    tokens: int
    """Number of tokens read."""
    used_S: Tensor
    """Number of tokens that use each expert."""
    weight_S: Tensor
    """Sum of its weights."""
    norm_S: Tensor
    """Sum of the norms of its outputs."""
    weighted_norm_S: Tensor
    """The same, weighted."""
    probability_S: Tensor
    """Sum of its scores over all tokens, whether or not they use it."""
    output_SD: Tensor
    """Sum of its outputs."""
    square_SD: Tensor
    """Sum of their squares."""

    @property
    def mean_SD(self) -> Tensor:
        """The mean output of each expert; 0 for unused experts."""
        return self.output_SD / self._counts().unsqueeze(-1)

    def statistics(self) -> dict[str, Tensor]:
        """The statistics of each expert [S]; 0 for unused experts."""
        counts_S = self._counts()
        variance_SD = self.square_SD / counts_S.unsqueeze(-1) - self.mean_SD.square()
        spread_S = variance_SD.clamp_min(0).sum(-1).sqrt()
        return {
            "frequency": self.used_S / max(1, self.tokens),
            "mean_weight": self.weight_S / counts_S,
            "mean_norm": self.norm_S / counts_S,
            "sum_norm": self.norm_S,
            "reap": self.weighted_norm_S / counts_S,
            "mone": spread_S * self.weight_S / counts_S,
            "probability": self.probability_S / max(1, self.tokens),
        }

    def _counts(self) -> Tensor:
        return self.used_S.clamp_min(1)


class ExpertMoments:
    """Accumulates moments of the experts of some layers.

    Args:
        layers: the layers to read.
    """

    def __init__(self, layers: Sequence[RoutedLayer]) -> None:
        self._layers = layers
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._probability = {each.name: torch.zeros(each.num_experts).double() for each in layers}

    @torch.inference_mode()
    def add(self, decisions: Mapping[str, Decision]) -> None:
        """Adds a batch, or the part of one block.

        Args:
            decisions: for tokens that count, by layer name; missing layers are added later.
        """
        for layer in self._layers:
            decision = decisions.get(layer.name)
            if decision is None:
                continue
            a_MS = decision.coefficients()
            self._tokens[layer.name] = self._tokens.get(layer.name, 0) + len(a_MS)
            p_S = torch.cat(decision.probabilities(), dim=-1).sum(0)
            self._probability[layer.name] = self._probability[layer.name].to(p_S) + p_S
            for column in range(layer.num_experts):
                rows_R = a_MS[:, column].nonzero().squeeze(-1)
                if len(rows_R):
                    output_RD = decision.output(*layer.place(column), rows_R).double()
                    self._add(layer, column, a_MS[rows_R, column].double(), output_RD)

    def _add(self, layer: RoutedLayer, column: int, weight_R: Tensor, output_RD: Tensor) -> None:
        norm_R = output_RD.norm(dim=-1)
        numbers = torch.stack(
            [torch.ones_like(norm_R), weight_R, norm_R, weight_R * norm_R], -1
        ).sum(0)
        row = torch.cat([numbers, output_RD.sum(0), output_RD.square().sum(0)])
        if layer.name not in self._sums:
            self._sums[layer.name] = row.new_zeros(layer.num_experts, len(row))
        self._sums[layer.name][column] += row

    def result(self, summed: Summed = lambda counts: counts) -> Mapping[str, Moments]:
        """What was found, by layer.

        Args:
            summed: sums over processes.

        Raises:
            ConfigError: outputs are not finite.
        """
        moments = {}
        for layer in self._layers:
            # A process that has read nothing knows the width of no output, but the others do.
            sums_SX = self._sums.get(layer.name, torch.zeros(layer.num_experts, 0).double())
            columns, processes = summed(sums_SX.new_tensor([sums_SX.shape[1], sums_SX.numel() > 0]))
            if not sums_SX.numel():
                size = max(4, round(float(columns / processes.clamp_min(1))))
                sums_SX = sums_SX.new_zeros(layer.num_experts, size)
            tokens_1 = sums_SX.new_full((1,), self._tokens.get(layer.name, 0))
            p_S = self._probability[layer.name].to(sums_SX)
            together = summed(torch.cat([sums_SX.flatten(), p_S, tokens_1])).cpu()
            if not together.isfinite().all():
                raise ConfigError(
                    f"the outputs of experts of {layer.name} are not finite: its weights hold NaN "
                    f"or inf, or are too large"
                )
            sums_SX = together[: sums_SX.numel()].view(sums_SX.shape)
            width = (sums_SX.shape[1] - 4) // 2
            used_S, weight_S, norm_S, weighted_S = sums_SX[:, :4].unbind(-1)
            moments[layer.name] = Moments(
                tokens=int(together[-1]),
                used_S=used_S,
                weight_S=weight_S,
                norm_S=norm_S,
                weighted_norm_S=weighted_S,
                probability_S=together[-1 - layer.num_experts : -1],
                output_SD=sums_SX[:, 4 : 4 + width],
                square_SD=sums_SX[:, 4 + width :],
            )
        return moments
