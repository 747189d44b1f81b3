"""The keys of a multilinear mixture of experts, and what follows from them."""

import dataclasses
from bisect import bisect_right
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from polyad.model.config import Config, Count, SectionError, whole_number_or
from polyad.model.feedforward import GATED, DenseFeedForwardConfig, FeedForwardSettings
from polyad.model.mumoe.factorizations import FACTORIZATIONS, Factorized, Sizes

FactorizationName = Literal["cp", "tr", "tt", "tucker"]


def check_levels(value: object) -> object:
    """Checks parsed numbers of experts before pydantic, for one error in one line."""
    numbers = list(value) if isinstance(value, list | tuple) else []
    if not numbers or any(type(number) is not int or number < 1 for number in numbers):
        raise ValueError("a list of numbers from 1, one for each level, as in [256]")
    return tuple(numbers)


Levels = Annotated[tuple[int, ...], BeforeValidator(check_levels)]


class FactorizedExperts(Config):
    """What every layer of factorized experts and their gate say."""

    num_experts: Levels = (64,)
    """Number of experts N, as a list with one number per level of a hierarchy: [256], or [128, 4].
    With several levels, the coefficient of a leaf is the product over levels."""
    factorization: FactorizationName = "cp"
    """Factorization of the tensor of all experts' weights: `cp`, `tr` (tensor ring), `tt` (tensor
    train) or `tucker`."""
    rank: Annotated[int | Literal["match-dense"], whole_number_or(1, "match-dense")] = "match-dense"
    """Rank R of the input and output factors (R3 of a tensor ring); `match-dense`: the rank at
    which the parameter count is closest to that of a dense block of the same hidden_size (a gated
    one if this one is gated), or of a linear head."""
    expert_rank: Count = 4
    """Rank of the expert modes: R1 = R2 of a tensor ring, R2 of a tensor train, the rank of each
    expert mode of Tucker; not used by CP."""
    gate: Literal["entmax15", "softmax"] = "entmax15"
    """How normalized scores become coefficients of the experts: `entmax15`, which gives most
    experts a coefficient of exactly 0, or `softmax`."""
    gate_norm: Literal["layer", "batch"] = "layer"
    """How scores are normalized: `layer`, over the experts of a token, or in a head of an image; or
    `batch`, over the tokens or images of a batch (only for vision models, because it leaks
    information about later tokens)."""
    level_std: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Standard deviation of the initial expert factors of all levels after the first, around one or
    the identity. With 0, as in the paper, the experts of these levels start equal and always get
    equal gradients (the gate starts at zero), so that such a level learns nothing; 0.1 makes them
    differ."""

    @property
    def factorized(self) -> type[Factorized]:
        """The class of the factorized layers."""
        return FACTORIZATIONS[self.factorization]

    def sizes(self, inputs: int, outputs: int) -> Sizes:
        """Returns the sizes of a layer of I inputs and O outputs, once the rank is a number."""
        assert isinstance(self.rank, int), "of_model() fills the rank in"
        names = {field.name for field in dataclasses.fields(Sizes)} & set(type(self).model_fields)
        keys = {name: getattr(self, name) for name in names}
        return Sizes(inputs=inputs, outputs=outputs, **keys)

    def nearest_rank(self, parameters: Callable[[Self], int], dense: int) -> Self:
        """Returns a copy with the rank, if it is `match-dense`, whose parameter count is closest to
        that without experts.

        Args:
            parameters: Counts the parameters of a layer; the count grows with the rank.
            dense: The number to match.

        Raises:
            SectionError: Even rank 1 has more.
        """

        def excess(rank: int) -> int:
            return parameters(self.model_copy(update={"rank": rank})) - dense

        if self.rank != "match-dense":
            return self
        if excess(1) > 0:
            raise SectionError(
                f"@rank: match-dense is not allowed with @num_experts: {list(self.num_experts)}: "
                f"even at rank 1 the experts and their gate have {excess(1) + dense:,} parameters, "
                f"but the layers that they replace only {dense:,}; use fewer experts, or give a "
                "number"
            )
        high = 2
        while excess(high) <= 0:
            high *= 2
        high = bisect_right(range(high), 0, lo=1, key=excess)  # the first rank with more
        rank = high - 1 if -excess(high - 1) <= excess(high) else high
        return self.model_copy(update={"rank": rank})


class MuMoEConfig(FactorizedExperts, FeedForwardSettings):
    """A muMoE: two factorized layers in which every expert takes part, weighted by one gate.

    Source: Oldfield et al. 2024, "Multilinear mixture of experts: scalable expert specialization
    through factorization".
    """

    kind: Literal["mumoe"] = "mumoe"
    """The kind of feed-forward."""
    hidden_size: Count | None = None
    """Inner width F, in units; null: four times the model's width."""
    activation: Literal["gelu", "swiglu", "geglu"] = "gelu"
    """Activation between the two layers: `gelu` (exact, as in the paper), or `swiglu` or `geglu`,
    for which a third factorized layer beside the first computes the gate."""
    bias: bool = True
    """Whether the experts of each layer have a bias. It is a row of the input factor, so weight
    decay applies to it."""
    gate_input: Literal["residual", "normalized"] = "residual"
    """Input of the gate: `residual`, the residual stream before the block's LayerNorm, or
    `normalized`, the input of the experts, after it."""
    gate_norm_epsilon: Annotated[float, Field(gt=0, le=1e6)] = 1.0e-5
    """Epsilon that is added to the variance of the scores before the square root by which they are
    divided. While scores are near zero, as at the start, the gate's gradients are divided by the
    square root of this number."""
    gate_std: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Standard deviation of the gate's initial weights. With 0, as in the paper, all experts have
    the same coefficient at first. Because scores are normalized, even the smallest value above 0
    lets the gate distinguish experts from the start."""
    expert_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a token drops an expert in training: the expert's coefficient is set to 0 in
    both layers, and the others are divided by 1 - expert_dropout. Applies to each level of a
    hierarchy."""
    expert_std: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Standard deviation of the initial expert factors of the first level, around one or the
    identity; the paper uses 1. Smaller values make experts more similar at the start."""
    factor_start: Literal["uniform", "orthogonal"] = "uniform"
    """Initialization of the input and output factors: `uniform`, independent entries as in the
    paper, or `orthogonal`, orthogonal rows or columns of equal norm, so that no direction is weaker
    than another."""
    factor_scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor of the initial input and output factors of both layers, for any factor_start. With CP
    and one level, the experts' weights in a layer with I inputs have the standard deviation
    factor_scale^2 sqrt((1 + expert_std^2) / I) / 3, whatever the rank: GPT-2's 0.02 needs 1.08 for
    I = 768 and 1.53 for I = 3072."""
    scale_residual_init: bool = False
    """Whether the initial output factor of the second layer is divided by sqrt(2 L), with L blocks,
    in GPT-2, like its other projections onto the residual stream. The paper does not do this, and
    training works better without it."""

    def of_model(self, *, width: int, bias: bool) -> Self:
        """See `FeedForwardSettings.of_model`: replaces `match-dense` by the rank as a number."""
        dense = DenseFeedForwardConfig(hidden_size=self.hidden_size)
        gated = self.activation in GATED
        return self.nearest_rank(
            lambda config: config.parameters(width), dense.parameters(width, bias, gated)
        )

    def check_model(self, *, num_layers: int, num_heads: int | None, causal: bool) -> None:
        """See `FeedForwardSettings.check_model`: norms in a language model must not see later
        tokens."""
        if causal and self.gate_norm == "batch":
            raise SectionError(
                "@gate_norm: batch is not allowed in a language model, because means over the "
                "batch leak the tokens to be predicted; allowed: layer"
            )

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """See `FeedForwardSettings.cut_sizes`: the inner width, and a rank."""
        rank = {"rank": self.layer_sizes(width)["up"].rank}
        inner = {"hidden_size": self.inner_size(width)}
        if self.factorization == "tr":
            return [inner, {"expert_rank": self.expert_rank} | rank]
        return [inner, rank]

    def layer_sizes(self, width: int) -> dict[str, Sizes]:
        """Returns the sizes of the layers by name, once the rank is a number.

        Args:
            width: D.
        """
        inner = self.inner_size(width)
        first = self.sizes(width, inner)
        gate = {"up_gate": first} if self.activation in GATED else {}
        return gate | {"up": first, "down": self.sizes(inner, width)}

    def parameters(self, width: int) -> int:
        """Counts the parameters of a block's feed-forward, including the gate.

        Args:
            width: D.
        """
        sizes = self.layer_sizes(width).values()
        layers = sum(self.factorized.num_parameters(each) for each in sizes)
        return sum(self.num_experts) * width + layers
