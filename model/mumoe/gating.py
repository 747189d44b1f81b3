"""The gate: maps a token to its coefficients over the experts of every level.

    a = phi(norm(G z))

Source: Oldfield et al. 2024, equation 1 and section 3.3; entmax-1.5: Peters et al. 2019, "Sparse
sequence-to-sequence models", with its threshold computed here without sorting.

Shapes: M tokens, D width, N experts of a level, S experts of all levels together.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, layer_norm, linear

from polyad.model.initialization import ONES, ZEROS, Initializer, normal
from polyad.model.layers import Region, same
from polyad.model.mumoe.config import FactorizedExperts
from polyad.model.output import NO_TENSORS

EPSILON = 1e-5
"""Default epsilon, added to the variance of the scores, from the paper."""
MOMENTUM = 0.1
"""Weight of a step's statistics in the update of BatchNorm's running statistics."""


def above_threshold(x_MN: Tensor) -> Tensor:
    """Computes max(x - tau, 0) with tau of each row such that the norm is 1; the highest x is 0.

    The norm is convex and decreasing in tau, so Newton steps from -1 never pass the root. Each step
    divides the product of the norm's excess and its slope by at least 4. It starts below N, and the
    slope is at least 1: n steps with 4^n >= N / epsilon suffice. All of them are always made, since
    a convergence test would synchronize with the device at each step.

    Args:
        x_MN: Values in fp32 or float64.

    Returns:
        A tensor of the same shape.
    """
    steps = math.ceil(math.log(x_MN.shape[-1] / torch.finfo(x_MN.dtype).eps, 4))
    tau_M1 = torch.full_like(x_MN[..., :1], -1.0)
    s_MN = (x_MN - tau_M1).clamp_(min=0)
    for _ in range(steps):
        norm_M1 = torch.linalg.vector_norm(s_MN, dim=-1, keepdim=True)
        excess_M1 = (norm_M1 - 1) * norm_M1
        tau_M1 = torch.addcdiv(tau_M1, excess_M1, s_MN.sum(-1, keepdim=True))
        s_MN = (x_MN - tau_M1).clamp_(min=0)
    return s_MN


class _Entmax15(torch.autograd.Function):
    """Entmax-1.5, computed exactly by Newton's method; backward only needs roots of the results."""

    @staticmethod
    def forward(ctx: Any, scores_MN: Tensor) -> Tensor:
        # p = s^2 with s = max(x - tau, 0), x = scores / 2, and tau such that p sums to 1. Shifting
        # all x changes nothing; with maximum 0, tau is between -1 and 0.
        x_MN = (scores_MN - scores_MN.amax(-1, keepdim=True)).div_(2)
        s_MN = above_threshold(x_MN)
        ctx.save_for_backward(s_MN)  # computing the root of p again would cost more than it saves
        return s_MN.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MN: Tensor) -> Tensor:
        # dp/dscores = diag(s) - s s^T / sum(s).
        (s_MN,) = ctx.saved_tensors
        scaled_MN = gradient_MN * s_MN
        mean_M1 = scaled_MN.sum(-1, keepdim=True) / s_MN.sum(-1, keepdim=True)
        result: Tensor = scaled_MN.addcmul_(s_MN, mean_M1, value=-1)
        return result


def entmax15(scores_MN: Tensor) -> Tensor:
    """Entmax-1.5 over the last dimension: between softmax and sparsemax, with exact zeros.

    Args:
        scores_MN: Scores in fp32 or float64.

    Returns:
        Coefficients that sum to 1, of the same shape.
    """
    result: Tensor = _Entmax15.apply(scores_MN)  # type: ignore[no-untyped-call]
    return result


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "entmax15": entmax15,
    "softmax": functools.partial(torch.softmax, dim=-1),
}


class GateOutput(NamedTuple):
    """The output of a gate, and of its norm before the activation."""

    coefficients: list[Tensor]
    """The coefficients of each level, [M, N], at least fp32; each row sums to 1. Of a norm the
    normalized scores."""
    moments: dict[str, Tensor] = NO_TENSORS
    """`score_mean_S` and `score_square_S`, the means over tokens of each expert's score before the
    norm and of its square, all levels side by side; empty unless the norm keeps running ones."""


class ScoreNorm(nn.Module, ABC):
    """The interface of score normalizations, before the activation. They have no parameters.

    Args:
        num_experts: N of each level.
        epsilon: Epsilon added to the variance of the scores.
    """

    def __init__(self, num_experts: Sequence[int], epsilon: float = EPSILON) -> None:
        super().__init__()
        self.num_experts, self.epsilon = list(num_experts), epsilon

    @abstractmethod
    def forward(self, scores_MS: Tensor) -> GateOutput:
        """Normalizes scores.

        Args:
            scores_MS: The scores of all levels side by side, at least fp32.
        """

    def update(self, moments: Mapping[str, Tensor]) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            moments: Those that `forward` returned, averaged over the step, among others.
        """


class LayerNorm(ScoreNorm):
    """Normalizes the scores of one token over the experts of a level; for language models."""

    def forward(self, scores_MS: Tensor) -> GateOutput:
        """See `ScoreNorm.forward`."""
        levels = scores_MS.split_with_sizes(self.num_experts, dim=-1)
        return GateOutput([layer_norm(x_MN, x_MN.shape[-1:], eps=self.epsilon) for x_MN in levels])


class BatchNorm(ScoreNorm):
    """Normalizes the scores of one expert over the tokens of a micro-batch; for vision models.

    A token's coefficients then depend on all tokens of the batch, including later ones: a language
    model would see the tokens that it has to predict. Evaluation uses running statistics, which the
    training loop updates once per step.

    Source: Oldfield et al. 2024, appendix F.1; their code synchronizes it over ranks.
    """

    running_mean: Tensor
    running_variance: Tensor

    def __init__(self, num_experts: Sequence[int], epsilon: float = EPSILON) -> None:
        super().__init__(num_experts, epsilon)
        self.mean: Region = same
        """The mean over ranks that have different tokens."""
        for name in ("running_mean", "running_variance"):
            self.register_buffer(name, torch.empty(sum(num_experts)))

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers: mean 0 and variance 1, which change nothing."""
        return {"running_mean": ZEROS, "running_variance": ONES}

    def forward(self, scores_MS: Tensor) -> GateOutput:
        """See `ScoreNorm.forward`."""
        mean_S, variance_S = self.running_mean, self.running_variance
        seen = scores_MS.detach()
        if self.training:
            mean_S, variance_S = self.moments(scores_MS)
        normalized_MS = (scores_MS - mean_S) * torch.rsqrt(variance_S + self.epsilon)
        levels = list(normalized_MS.to(scores_MS.dtype).split_with_sizes(self.num_experts, dim=-1))
        moments = {"score_mean_S": seen.mean(0), "score_square_S": seen.square().mean(0)}
        return GateOutput(levels, moments)

    def moments(self, scores_MS: Tensor) -> tuple[Tensor, Tensor]:
        """Computes mean and variance over the tokens of all ranks' micro-batches, differentiably.

        With padding, ranks are weighted by their number of tokens.

        Args:
            scores_MS: The scores of this rank's tokens.

        Returns:
            [S] and [S]; the variance is the mean of squares.
        """
        variance_S, mean_S = torch.var_mean(scores_MS, dim=0, correction=0)
        if self.mean is same:
            return mean_S, variance_S
        # At least fp32, in which token counts are exact.
        wide = torch.promote_types(scores_MS.dtype, torch.float32)
        here_S, variance_S = mean_S.to(wide), variance_S.to(wide)
        count_1 = here_S.new_full((1,), len(scores_MS))
        sums = self.mean(torch.cat([count_1 * here_S, count_1]))
        weight_1 = count_1 / sums[-1:].detach()  # the weight of this rank, 1 on average
        mean_S = sums[:-1] / sums[-1:].detach()
        # The local variance is relative to the local mean; relative to the global mean it is
        # larger.
        spread_S = weight_1 * (variance_S + (here_S - mean_S).square())
        return mean_S, self.mean(spread_S)

    def update(self, moments: Mapping[str, Tensor]) -> None:
        """Updates the running statistics from the step's."""
        mean_S, square_S = moments["score_mean_S"], moments["score_square_S"]
        self.running_mean.lerp_(mean_S.to(self.running_mean), MOMENTUM)
        variance_S = (square_S - mean_S.square()).clamp(min=0)
        self.running_variance.lerp_(variance_S.to(self.running_variance), MOMENTUM)


NORMS: dict[str, type[ScoreNorm]] = {"layer": LayerNorm, "batch": BatchNorm}


class GateRegions(NamedTuple):
    """Where ranks that share a gate exchange tensors; see `model/layers.py`."""

    input: Region = same
    """Applied to the gate's input."""
    weight: Region = same
    coefficients: Region = same
    """Applied to the coefficients of a level."""


class Gate(nn.Module):
    """A linear score for every expert of every level, a normalization, and an activation.

    With zero weights, every expert has the coefficient 1 / N for all tokens.

    Args:
        config: What a layer says of its experts and gate.
        width: D.
        epsilon: Epsilon added to the variance of the scores in the norm.
        std: Standard deviation of the initial weights; zero in the authors' code.
        dropout: Probability that a coefficient is dropped in training.
    """

    def __init__(
        self,
        config: FactorizedExperts,
        width: int,
        *,
        epsilon: float = EPSILON,
        std: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(config.num_experts), width))
        self.norm = NORMS[config.gate_norm](config.num_experts, epsilon)
        self.activation = ACTIVATIONS[config.gate]
        self.std, self.dropout = std, dropout
        self.regions = GateRegions()

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of the weights: normal, or zero."""
        return {"weight": normal(self.std) if self.std else ZEROS}

    def forward(self, u_MD: Tensor) -> GateOutput:
        """Computes the coefficients of every token.

        Args:
            u_MD: The gate's input.
        """
        scores_MS = linear(self.regions.input(u_MD), self.regions.weight(self.weight))
        # The product is in the model's precision, the rest at least in fp32.
        scores_MS = scores_MS.to(torch.promote_types(scores_MS.dtype, torch.float32))
        levels, moments = self.norm(scores_MS)
        return GateOutput([self.activation(x_MN) for x_MN in levels], moments)

    def mixing_weights(self, output: GateOutput, dtype: torch.dtype) -> list[Tensor]:
        """Returns the coefficients for the layers: in their precision, in training with dropout.

        Args:
            output: The output of the gate.
            dtype: The dtype of the layers.

        Returns:
            Coefficients of each level, [M, N].
        """
        levels = output.coefficients
        if self.training and self.dropout:
            # From the default generator: every tensor-parallel rank draws the same numbers, and
            # recomputation draws them again.
            levels = [dropout(a_MN, self.dropout) for a_MN in levels]
        return [self.regions.coefficients(a_MN.to(dtype)) for a_MN in levels]
