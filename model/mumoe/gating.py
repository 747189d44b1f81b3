"""The gate: from a token to its coefficients over the experts of every level.

    a = phi(norm(G z))

Source: Oldfield et al. 2024, equation 1 and section 3.3; entmax-1.5: Peters et al. 2019, "Sparse
sequence-to-sequence models"; its threshold here without sorting.

Shapes: M tokens, D width, N experts of a level, S experts of all levels together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, layer_norm, linear

from polyad.model.initialization import ONES, ZEROS, Initializer, normal
from polyad.model.kernels.entmax import above_threshold
from polyad.model.regions import Region, same

EPSILON = 1e-5
"""Added to the variance of the scores, unless a gate says otherwise: the paper's."""
MOMENTUM = 0.1
"""Share by which BatchNorm's running statistics move towards those of a step."""


class _Entmax15(torch.autograd.Function):
    """Entmax-1.5, exact by Newton's method; backward needs only the roots of the results."""

    @staticmethod
    def forward(ctx: Any, scores_MN: Tensor) -> Tensor:
        # p = s^2 with s = max(x - tau, 0), x = scores / 2, and tau such that p sums to 1. Adding a
        # number to all x changes nothing; with 0 as the highest, tau is between -1 and 0.
        x_MN = (scores_MN - scores_MN.amax(-1, keepdim=True)).div_(2)
        s_MN = above_threshold(x_MN)
        ctx.save_for_backward(s_MN)  # a root of p would take longer than what it would save
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
        scores_MN: In fp32 or float64.

    Returns:
        Coefficients that sum to 1, of the same shape.
    """
    result: Tensor = _Entmax15.apply(scores_MN)  # type: ignore[no-untyped-call]
    return result


def softmax(scores_MN: Tensor) -> Tensor:
    """Softmax over the last dimension, the paper's ablation."""
    return scores_MN.softmax(-1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"entmax15": entmax15, "softmax": softmax}


class SoftmaxFirst(nn.Module):
    """Softmax in a run's first steps, another activation in those after them.

    Its state is in a buffer: `forward` reads it, `update` is called after each optimizer step.

    Args:
        later: A name of `ACTIVATIONS`, of the steps after the first ones.
        share: The share of the run's steps that are the first ones.
    """

    is_softmax: Tensor

    def __init__(self, later: str, share: float) -> None:
        super().__init__()
        self.later, self.share = ACTIVATIONS[later], share
        # The buffer as a plain value: reading a buffer in `forward` would wait for the device.
        self.uses_softmax = True
        self.register_buffer("is_softmax", torch.empty((), dtype=torch.int64))

    def initializers(self) -> dict[str, Initializer]:
        """A run begins with softmax."""
        return {"is_softmax": ONES}

    def buffers_changed(self) -> None:
        """Reads the buffer, after a checkpoint was loaded into it."""
        self.uses_softmax = bool(self.is_softmax)

    @torch.no_grad()
    def update(self, progress: float) -> None:
        """Prepares the next optimizer step; after the last one all stays as it was trained.

        Args:
            progress: Share of the run's steps that are done.
        """
        # A run that is made longer later does not go back to softmax.
        if self.uses_softmax and self.share - 1e-9 <= progress < 1:
            self.is_softmax.zero_()
            self.uses_softmax = False  # the buffer, read back, would wait for the device

    def forward(self, scores_MN: Tensor) -> Tensor:
        """Coefficients that sum to 1; see `ACTIVATIONS`."""
        return softmax(scores_MN) if self.uses_softmax else self.later(scores_MN)


class Normalized(NamedTuple):
    """Scores of every token, normalized."""

    levels: list[Tensor]
    """The scores of each level, [M, N]."""
    mean_S: Tensor | None = None
    """Mean over tokens of the scores before the norm; None unless the norm keeps a running mean."""
    square_S: Tensor | None = None
    """Mean over tokens of the squared scores; None as `mean_S`."""


class ScoreNorm(nn.Module, ABC):
    """The interface of norms of the scores, before the activation. They have no parameters.

    Args:
        num_experts: N of each level.
        epsilon: Added to the variance of the scores.
    """

    def __init__(self, num_experts: Sequence[int], epsilon: float = EPSILON) -> None:
        super().__init__()
        self.num_experts, self.epsilon = list(num_experts), epsilon

    def initializers(self) -> dict[str, Initializer]:
        """Says how each buffer starts; see `model/initialization.py`."""
        return {}

    @abstractmethod
    def forward(self, scores_MS: Tensor) -> Normalized:
        """Normalizes.

        Args:
            scores_MS: The scores of all levels side by side, in fp32 at least.
        """

    def update(self, mean_S: Tensor | None, square_S: Tensor | None) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            mean_S: What `forward` returned, averaged over the step.
            square_S: Returned by `forward`, too, and averaged.
        """


class LayerNorm(ScoreNorm):
    """The scores of one token over the experts of a level, for language models."""

    def forward(self, scores_MS: Tensor) -> Normalized:
        """See `ScoreNorm.forward`."""
        levels = scores_MS.split_with_sizes(self.num_experts, dim=-1)
        return Normalized([layer_norm(x_MN, x_MN.shape[-1:], eps=self.epsilon) for x_MN in levels])


class BatchNorm(ScoreNorm):
    """The scores of one expert over the tokens of a micro-batch, for vision models.

    A token's coefficients then depend on all tokens of the batch, later ones too: a language model
    would see the tokens that it has to predict. Evaluation uses running statistics, which the
    training loop updates once a step.

    Source: Oldfield et al. 2024, appendix F.1; their code synchronizes it over processes.
    """

    running_mean: Tensor
    running_variance: Tensor

    def __init__(self, num_experts: Sequence[int], epsilon: float = EPSILON) -> None:
        super().__init__(num_experts, epsilon)
        self.mean: Region = same
        """The mean over the processes that have other tokens."""
        for name in ("running_mean", "running_variance"):
            self.register_buffer(name, torch.empty(sum(num_experts)))

    def initializers(self) -> dict[str, Initializer]:
        """Mean 0 and variance 1, as if nothing was normalized."""
        return {"running_mean": ZEROS, "running_variance": ONES}

    def forward(self, scores_MS: Tensor) -> Normalized:
        """See `ScoreNorm.forward`."""
        mean_S, variance_S = self.running_mean, self.running_variance
        seen = scores_MS.detach()
        if self.training:
            mean_S, variance_S = self.moments(scores_MS)
        normalized_MS = (scores_MS - mean_S) * torch.rsqrt(variance_S + self.epsilon)
        levels = list(normalized_MS.to(scores_MS.dtype).split_with_sizes(self.num_experts, dim=-1))
        return Normalized(levels, seen.mean(0), seen.square().mean(0))

    def moments(self, scores_MS: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance over the tokens of the micro-batches of all processes, with gradients.

        With padding some processes have more tokens than others, and count for more.

        Args:
            scores_MS: The scores of this process's tokens.

        Returns:
            [S] and [S]; the variance is the mean of squares.
        """
        variance_S, mean_S = torch.var_mean(scores_MS, dim=0, correction=0)
        if self.mean is same:
            return mean_S, variance_S
        # At least fp32, in which numbers of tokens are exact.
        wide = torch.promote_types(scores_MS.dtype, torch.float32)
        here_S, variance_S = mean_S.to(wide), variance_S.to(wide)
        count_1 = here_S.new_full((1,), len(scores_MS))
        sums = self.mean(torch.cat([count_1 * here_S, count_1]))
        weight_1 = count_1 / sums[-1:].detach()  # of this process, 1 on average
        mean_S = sums[:-1] / sums[-1:].detach()
        # The local variance is around the local mean; around the mean of all it is larger.
        spread_S = weight_1 * (variance_S + (here_S - mean_S).square())
        return mean_S, self.mean(spread_S)

    def update(self, mean_S: Tensor | None, square_S: Tensor | None) -> None:
        """Moves the running statistics towards the step's."""
        assert mean_S is not None
        assert square_S is not None
        self.running_mean.lerp_(mean_S.to(self.running_mean), MOMENTUM)
        variance_S = (square_S - mean_S.square()).clamp(min=0)
        self.running_variance.lerp_(variance_S.to(self.running_variance), MOMENTUM)


NORMS: dict[str, type[ScoreNorm]] = {"layer": LayerNorm, "batch": BatchNorm}


class GateOutput(NamedTuple):
    """The output of a gate."""

    coefficients: list[Tensor]
    """The coefficients of each level, [M, N], fp32 at least; each row sums to 1."""
    mean_S: Tensor | None
    """See `Normalized`."""
    square_S: Tensor | None
    """See `Normalized`."""


class GateRegions(NamedTuple):
    """Where the processes that share a gate exchange numbers; see `model/regions.py`."""

    input: Region = same
    """What the gate reads."""
    weight: Region = same
    coefficients: Region = same
    """The coefficients of a level."""


class Gate(nn.Module):
    """One linear score for every expert of every level, a norm, an activation.

    At zero, every expert has the coefficient 1 / N, whatever the token.

    Args:
        num_experts: N of each level.
        width: D.
        activation: A name of `ACTIVATIONS`.
        norm: A name of `NORMS`.
        epsilon: Added to the variance of the scores in the norm.
        std: Standard deviation of the initial weights; zero in the authors' code.
        dropout: Probability with which the layers do without a coefficient in training.
        softmax_share: The share of the run's steps, from the first, with softmax as the activation.
    """

    def __init__(
        self,
        num_experts: Sequence[int],
        width: int,
        activation: str,
        norm: str,
        *,
        epsilon: float = EPSILON,
        std: float = 0.0,
        dropout: float = 0.0,
        softmax_share: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(num_experts), width))
        self.norm = NORMS[norm](num_experts, epsilon)
        self.activation = ACTIVATIONS[activation]
        if softmax_share:
            self.activation = SoftmaxFirst(activation, softmax_share)
        self.std, self.dropout = std, dropout
        self.regions = GateRegions()

    def initializers(self) -> dict[str, Initializer]:
        """Normal, or zero."""
        return {"weight": normal(self.std) if self.std else ZEROS}

    def forward(self, u_MD: Tensor) -> GateOutput:
        """Weighs the experts for every token.

        Args:
            u_MD: What the gate reads.
        """
        scores_MS = self.scores(u_MD)
        # The product is in the model's precision, the rest in fp32 at least.
        scores_MS = scores_MS.to(torch.promote_types(scores_MS.dtype, torch.float32))
        levels, mean_S, square_S = self.norm(scores_MS)
        return GateOutput([self.activation(x_MN) for x_MN in levels], mean_S, square_S)

    def scores(self, u_MD: Tensor) -> Tensor:
        """Scores every expert of every level.

        Args:
            u_MD: What the gate reads.

        Returns:
            [M, S].
        """
        return linear(self.regions.input(u_MD), self.regions.weight(self.weight))

    def mixing_weights(self, output: GateOutput, dtype: torch.dtype) -> list[Tensor]:
        """The coefficients that both layers get: in their precision, in training some dropped.

        Args:
            output: What the gate decided.
            dtype: The dtype of the layers.

        Returns:
            Of each level, [M, N].
        """
        levels = output.coefficients
        if self.training and self.dropout:
            # Of the default generator: every tensor-parallel process draws the same, and
            # recomputation draws it again.
            levels = [dropout(a_MN, self.dropout) for a_MN in levels]
        return [self.regions.coefficients(a_MN.to(dtype)) for a_MN in levels]

    def update(self, mean_S: Tensor | None, square_S: Tensor | None, progress: float) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            mean_S: What the norm returned, averaged over the step.
            square_S: Returned by the norm, too, and averaged.
            progress: Share of the run's steps that are done.
        """
        self.norm.update(mean_S, square_S)
        if isinstance(self.activation, SoftmaxFirst):
            self.activation.update(progress)
