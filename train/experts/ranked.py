"""The loss without the highest and without the lowest of a token's experts, by some statistic.

If a statistic predicts which experts matter, a token's loss rises more without its highest expert
than without its lowest (2606.10703). Two ways to remove an expert are compared:

    described   at the token itself, and nowhere else
    coded       as in the script published with that paper: at every token of the text, and with
                means of the router's logits in place of an expert's use and mean weight

Shapes: B windows of a batch, T tokens of a window, P predicted tokens, M tokens in total, N audited
tokens, n of them in a batch, S experts of a layer, K experts of a token, C statistics, R rows of a
forward pass, D width.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.smoe.layer import SelectingMoE
from polyad.train.experts.actions import CONTRIBUTION, Action, intervening
from polyad.train.experts.information import Summed
from polyad.train.experts.moments import Moments
from polyad.train.experts.probing import Decision, RoutedLayer
from polyad.train.tasks.samples import Passages, losses, through

AUDITED = ("frequency", "mean_weight", "mean_norm", "reap", "mone")
"""Statistics of an expert over all tokens, from `moments.py`."""
CONTROLS = ("own_weight", "random")
"""Controls: the token's own weight of an expert, and random choice."""
WAYS = ("described", "coded")


class PairedTest(NamedTuple):
    """A paired test of the change of the loss without the highest and without the lowest."""

    high: float
    """The mean change without the highest expert, in nats."""
    low: float
    d: float | None
    """Mean difference divided by its standard deviation; None: no deviation."""
    t: float | None
    p: float | None
    """Two-sided, of Student's t with n - 1 degrees of freedom."""
    p_wilcoxon: float | None
    """The p-value of Wilcoxon's signed-rank test."""

    @classmethod
    def of(cls, change_N2: Tensor, ddof: int = 1) -> "PairedTest":
        """Tests changes of the loss.

        Args:
            change_N2: changes without each token's highest expert, and without its lowest.
            ddof: subtracted from the number of tokens in the standard deviation of `d`.
        """
        from scipy.stats import ttest_rel, wilcoxon

        high_N, low_N = change_N2.unbind(-1)
        high, low = float(high_N.mean()), float(low_N.mean())
        difference_N = high_N - low_N
        if len(difference_N) < 2 or float(difference_N.std()) <= 1e-12:
            return cls(high, low, None, None, None, None)
        t, p = ttest_rel(high_N.numpy(), low_N.numpy())
        d = float(difference_N.mean() / difference_N.std(correction=ddof))
        p_wilcoxon = float(wilcoxon(difference_N.numpy()).pvalue)
        return cls(high, low, d, float(t), float(p), p_wilcoxon)


class RouterLogits:
    """Means of router logits, which the published script uses for use and mean weight.

    Args:
        layers: layers that select experts.
    """

    blocks: Sequence[int] = ()

    def __init__(self, layers: Sequence[RoutedLayer]) -> None:
        self._layers = layers
        self._seen: dict[str, Tensor] = {}
        self._kept: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
        self.scored: list[tuple[Tensor, Tensor]] = []
        """Window numbers, and which of their predicted tokens count, per batch."""

    @contextmanager
    def reading(self, model: nn.Module) -> Iterator[None]:
        """A context in which logits are collected."""

        def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
            def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
                self._seen[name] = output

            return hook

        with ExitStack() as stack:
            for layer in self._layers:
                parent = model.get_submodule(layer.name)
                assert isinstance(parent, SelectingMoE)
                handle = parent.router.score.register_forward_hook(keep(layer.name))
                stack.callback(handle.remove)
            yield

    def add(self, reading: Any) -> None:
        """Adds a batch."""
        counts_M = reading.batch.scored_BP.flatten()
        self.scored.append((reading.number_R.cpu(), reading.batch.scored_BP.cpu()))
        for layer in self._layers:
            self._kept[layer.name].append(self._seen[layer.name][counts_M].float().cpu())

    def means(
        self, layer: RoutedLayer, top_k: int, summed: Summed, lowest: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Returns substitutes of two statistics, each [S].

        An expert counts as used if its logit reaches the K-th highest of *any* token, so nearly all
        do.

        Args:
            layer: one of the layers read.
            top_k: experts per token.
            summed: sums over processes.
            lowest: minimum over processes.
        """
        kept = self._kept[layer.name] or [torch.empty(0, layer.num_experts)]
        logits_MS = torch.cat(kept).double()
        threshold = torch.full((), math.inf, dtype=torch.float64)
        if len(logits_MS):
            threshold = logits_MS.topk(top_k, dim=-1).values[:, -1].min()
        used_MS = logits_MS >= lowest(threshold)
        sums_4S = torch.stack([
            logits_MS.sum(0),
            torch.full((layer.num_experts,), len(logits_MS), dtype=torch.float64),
            (logits_MS * used_MS).sum(0),
            used_MS.double().sum(0),
        ])  # fmt: skip
        sum_S, tokens_S, used_sum_S, used_S = summed(sums_4S)
        return {
            "frequency": sum_S / tokens_S,
            "mean_weight": used_sum_S / used_S.clamp_min(1),
        }


def chosen_places(scored: Tensor, positions: int, seed: int) -> Tensor:
    """Draws random predicted tokens [N, 2]: their windows' numbers, and their positions in these.

    Args:
        scored: which tokens count, [windows, P].
        positions: N, or all if there are fewer.
        seed: seed of the choice.
    """
    places_M2 = scored.nonzero()
    chance = torch.Generator().manual_seed(seed)
    order_M = torch.randperm(len(places_M2), generator=chance)
    return places_M2[order_M[:positions].sort().values]


class RankedAblation:
    """Removes the highest and the lowest expert of some tokens in a layer.

    Args:
        model: a decoder, in evaluation mode, on one device.
        layer: a layer that selects experts.
        moments: moments of its experts.
        logits: substitutes of some statistics for the way `coded`.
        places_N2: the tokens; see `chosen_places`.
        action: the action on an expert at the token.
        seed: seed of random experts.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: RoutedLayer,
        moments: Moments,
        logits: Mapping[str, Tensor],
        places_N2: Tensor,
        action: Action,
        seed: int,
    ) -> None:
        self._model, self.layer, self._places_N2 = model, layer, places_N2
        self._device = next(model.parameters()).device
        statistics = moments.statistics()
        described = {name: statistics[name] for name in AUDITED}
        self._ways = [
            (described, action, True),
            (described | dict(logits), CONTRIBUTION, False),
        ]
        chance = torch.Generator().manual_seed(seed)
        self._chance_NS = torch.rand(len(places_N2), layer.num_experts, generator=chance)
        shape = len(WAYS), len(places_N2), len(AUDITED) + len(CONTROLS), 2
        self._change_WNC2 = torch.zeros(shape, dtype=torch.float64)
        self._off = 0.0

    @torch.inference_mode()
    def add(self, x_BTD: Tensor, passages: Passages, loss_BP: Tensor, decision: Decision) -> None:
        """Adds a batch.

        Args:
            x_BTD: input of the layer's block.
            passages: the windows.
            loss_BP: loss of the unchanged model.
            decision: the layer's decision.
        """
        row_of = {number: row for row, number in enumerate(passages.number_B.tolist())}
        some = [n for n, (window, _) in enumerate(self._places_N2.tolist()) if window in row_of]
        if not some:
            return
        n = torch.tensor(some)
        row_n = torch.tensor([row_of[int(window)] for window in self._places_N2[n, 0]])
        place_n = self._places_N2[n, 1]
        row_n, place_n = row_n.to(self._device), place_n.to(self._device)
        assert decision.selected is not None
        ids_nK, weights_nK = (
            each.view(*x_BTD.shape[:2], -1)[row_n, place_n]
            for each in (decision.selected.expert_ids_NK, decision.selected.weights_NK)
        )
        for way, (statistics, action, alone) in enumerate(self._ways):
            ranks_CnK = [each_S.to(self._device)[ids_nK] for each_S in statistics.values()]
            ranks_CnK += [weights_nK.double()]
            ranks_CnK += [self._chance_NS[n].to(self._device).gather(1, ids_nK).double()]
            picks = [(each.argmax(-1), each.argmin(-1)) for each in ranks_CnK]
            pick_nC2 = torch.stack([torch.stack(pair, -1) for pair in picks], 1)
            loss_nK = self._without(
                *(x_BTD, passages, row_n, place_n, ids_nK, pick_nC2, action), alone=alone
            )
            change_nK = loss_nK - loss_BP[row_n, place_n].double().unsqueeze(-1)
            taken_nX = change_nK.gather(1, pick_nC2.flatten(1))
            self._change_WNC2[way, n] = taken_nX.view(pick_nC2.shape).cpu()
        again_BTD = through(self._model, x_BTD, self.layer.block)
        off = (losses(self._model, again_BTD, passages) - loss_BP)[row_n, place_n]
        self._off = max(self._off, float(off.abs().max()))

    def _without(
        self,
        x_BTD: Tensor,
        passages: Passages,
        row_n: Tensor,
        place_n: Tensor,
        ids_nK: Tensor,
        pick_nC2: Tensor,
        action: Action,
        *,
        alone: bool,
    ) -> Tensor:
        """Losses of tokens without each of their experts that a statistic selects, [n, K]."""
        needed_nK = torch.zeros_like(ids_nK, dtype=torch.bool)
        needed_nK.scatter_(1, pick_nC2.flatten(1), True)
        token_R, k_R = needed_nK.nonzero().unbind(-1)
        loss_nK = torch.zeros(ids_nK.shape, dtype=torch.float64, device=self._device)
        with intervening(self._model, self.layer, action) as intervene:
            for first in range(0, len(token_R), len(x_BTD)):
                token_r, k_r = (each[first : first + len(x_BTD)] for each in (token_R, k_R))
                r, places_r = torch.arange(len(token_r), device=self._device), place_n[token_r]
                chosen_rS = torch.zeros(
                    len(r), self.layer.num_experts, dtype=torch.bool, device=self._device
                )
                chosen_rS[r, ids_nK[token_r, k_r]] = True
                at_rT = torch.zeros(len(r), x_BTD.shape[1], dtype=torch.bool, device=self._device)
                at_rT[r, places_r] = True
                intervene(chosen_rS, at_rT if alone else None)
                y_rTD = through(self._model, x_BTD[row_n[token_r]], self.layer.block)
                target_r1 = passages.target_BP[row_n[token_r], places_r].unsqueeze(1)
                one = passages._replace(target_BP=target_r1)
                loss_r1 = losses(self._model, y_rTD[r, places_r].unsqueeze(1), one)
                loss_nK[token_r, k_r] = loss_r1[:, 0].double()
        return loss_nK

    def result(self, summed: Summed) -> tuple[Tensor, float]:
        """Returns the result.

        Args:
            summed: sums over processes.

        Returns:
            Changes of the loss [ways, N, C, 2], without the highest and without the lowest; and the
            difference of losses from the first ones after all experts were restored.
        """
        off = torch.tensor([self._off], dtype=torch.float64, device=self._device)
        return summed(self._change_WNC2.to(self._device)).cpu(), float(summed(off))
