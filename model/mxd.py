"""Transcoders and mixtures of decoders as feed-forwards of a block.

    a = TopK(relu(G u + g))
    transcoder            y = C^T a + b
    mixture of decoders   y = (C^T a) * D^T phi(E^T u + e) + b

A transcoder's output is a sum of a few rows of the table C. In a mixture of decoders that sum
scales the output of a dense feed-forward channel by channel: expert n is the second layer D
diag(c_n), of full rank, at the cost of one row. This is the CP factorization of all these layers
with R = O and an identity output factor (`model/mumoe/factorizations.py`).

Rows of C have unit length. The authors rescale the stored rows before each step and remove the
component along a row from its gradient; here rows are normalized when read, which is the same
function with the same gradient direction, in any parallel layout and with any optimizer.

Shapes: B batch, T tokens in a sequence, M real tokens, D width, H inner width of the dense part, N
experts, K experts of a token.
"""

import dataclasses
from abc import ABC
from collections.abc import Callable
from typing import Annotated, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, linear, normalize

from polyad.model.config import Count, SectionError, whole_number_or
from polyad.model.feedforward import (
    GATED,
    NOTHING_ELSE,
    Activation,
    BlockInput,
    DenseFeedForward,
    DenseFeedForwardConfig,
    FeedForward,
    FeedForwardContext,
    FeedForwardSettings,
    GatedActivation,
)
from polyad.model.initialization import ZEROS, Initializer, uniform, unit_rows
from polyad.model.layers import Linear, RealTokens, Region, pack, same, unpack
from polyad.model.output import RoutingStats, StatisticsModule
from polyad.model.smoe.config import at_most
from polyad.model.smoe.router import Selected, count

MATCH_DENSE: Literal["match-dense"] = "match-dense"


class SparseTableConfig(FeedForwardSettings, ABC):
    """The keys that a mixture of decoders and a transcoder share."""

    num_experts: Count = 1024
    """Number of experts N."""
    top_k: Count = 32
    """Number of experts K that each token keeps: those with the highest scores, and only scores
    above 0."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        at_most("top_k", self.top_k, "@num_experts", self.num_experts)
        return self


class TranscoderConfig(SparseTableConfig):
    """A transcoder: a wide, sparse replacement for a trained feed-forward with interpretable
    features.

    Source: Dunefsky et al. 2024, "Transcoders find interpretable LLM feature circuits", with the K
    highest features instead of a sparsity penalty (Gao et al. 2024).
    """

    kind: Literal["transcoder"] = "transcoder"
    """The kind of feed-forward. Its experts are features, each with one output vector."""

    def inner_size(self, width: int) -> int:
        """Returns the number of features, the inner width."""
        return self.num_experts

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """Returns the number of experts, which tensor parallelism splits."""
        return [{"num_experts": self.num_experts}]


class MixtureOfDecodersConfig(SparseTableConfig):
    """A dense feed-forward whose output is scaled, channel by channel, by a few of very many
    experts.

    Source: Oldfield et al. 2025, "Towards interpretability without sacrifice: faithful dense layer
    decomposition with mixture of decoders".
    """

    kind: Literal["mxd"] = "mxd"
    """The kind of feed-forward."""
    hidden_size: Annotated[
        Count | Literal["match-dense"] | None, whole_number_or(1, MATCH_DENSE, None)
    ] = None
    """Inner width H of the dense part, in units; null: four times the model's width; `match-dense`:
    the width at which the block has the parameter count closest to a dense block with four times
    the model's width (a gated one if this one is gated)."""
    activation: Activation | GatedActivation = "gelu_tanh"
    """Activation of the dense part, that of the feed-forward which it replaces: `gelu_tanh`,
    `gelu`, `quick_gelu`, or with a gate `swiglu`, `geglu`, `clamped_swiglu`."""

    def inner_size(self, width: int) -> int:
        """Returns the inner width H of the dense part, once it is a number."""
        return self._dense().inner_size(width)

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """Returns the numbers of experts and inner units, which tensor parallelism splits."""
        return [{"num_experts": self.num_experts}, {"hidden_size": self.inner_size(width)}]

    def parameters(self, width: int, bias: bool) -> int:
        """Counts the parameters of a block's feed-forward.

        Args:
            width: D.
            bias: Whether the dense part's first layer has a bias.
        """
        dense = self._dense().parameters(width, bias, self.activation in GATED)
        # The gate and its bias, and the table; there is an output bias in any case.
        return self.num_experts * (2 * width + 1) + dense + width - bias * width

    def of_model(self, *, width: int, bias: bool) -> Self:
        """Replaces `match-dense` by the inner width as a number."""
        if self.hidden_size != MATCH_DENSE:
            return self
        gated = self.activation in GATED
        dense = DenseFeedForwardConfig().parameters(width, bias, gated)
        smallest = self.model_copy(update={"hidden_size": 1}).parameters(width, bias)
        if smallest > dense:
            raise SectionError(
                "@hidden_size: match-dense is not allowed with @num_experts: "
                f"{self.num_experts}: even with one inner unit the block has {smallest:,} "
                f"parameters, but the dense one only {dense:,}; use fewer experts, or give a "
                "number"
            )
        of_unit = (2 + gated) * width + bias * (1 + gated)
        size = 1 + round((dense - smallest) / of_unit)
        return self.model_copy(update={"hidden_size": size})

    def _dense(self) -> DenseFeedForwardConfig:
        assert self.hidden_size != MATCH_DENSE, "of_model() fills it in"
        return DenseFeedForwardConfig(hidden_size=self.hidden_size)


class SparseGate(nn.Module):
    """Linear scores, of which the K highest are kept if they are above 0.

    Source: Oldfield et al. 2025, who also use PyTorch's initialization of linear layers.

    Args:
        num_experts: N.
        width: D.
        top_k: K.
    """

    def __init__(self, num_experts: int, width: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.bias = nn.Parameter(torch.empty(num_experts))
        self.bound = width**-0.5
        self.agreed: Region = same
        """Makes ranks with the same tokens agree; see `Selection.agreed`."""

    def initializers(self) -> dict[str, Initializer]:
        """Returns PyTorch's uniform initializer of linear layers."""
        return {"weight": uniform(self.bound), "bias": uniform(self.bound)}

    def forward(self, u_MD: Tensor) -> Selected:
        """Selects and weights the experts of every token.

        Args:
            u_MD: The gate's input.

        Returns:
            Weights of K experts, at least fp32, with a gradient if above 0. Experts of weight 0 are
            not counted.
        """
        scores_MN = linear(u_MD, self.weight, self.bias)
        scores_MN = scores_MN.to(torch.promote_types(scores_MN.dtype, torch.float32))
        ids_MK = self.agreed(scores_MN.detach().topk(self.top_k, dim=1).indices)
        weights_MK = scores_MN.gather(1, ids_MK).relu()
        # One more bin for slots without an expert.
        used_MK = torch.where(weights_MK > 0, ids_MK, self.num_experts)
        return Selected(weights_MK, ids_MK, count(used_MK, self.num_experts + 1)[:-1])


MULTIPLIED_WHOLE = 1024
"""Maximum number of rows of a table that a GPU multiplies as a whole."""


def sum_of_rows(rows_ND: Tensor, ids_MK: Tensor, weights_MK: Tensor, *, whole: bool) -> Tensor:
    """Computes weighted sums of a few rows of a table.

    Args:
        rows_ND: The table.
        ids_MK: Indices of the rows.
        weights_MK: Their weights.
        whole: Whether to multiply the whole table by a mostly zero weight matrix, which is faster
            on a GPU if the table is small (BENCHMARKS.md, "A first look at a GPU").

    Returns:
        [M, D].
    """
    if whole and len(rows_ND) <= MULTIPLIED_WHOLE:
        weights_MN = weights_MK.new_zeros(len(weights_MK), len(rows_ND))
        return weights_MN.scatter_add(1, ids_MK, weights_MK) @ rows_ND
    return embedding_bag(ids_MK, rows_ND, per_sample_weights=weights_MK, mode="sum")


class SparseTable(FeedForward, StatisticsModule):
    """A transcoder, and the base class of a mixture of decoders: a sparse gate over the rows of a
    table, whose sum is the output.

    Args:
        config: Its own configuration, filled in.
        context: Settings of the model.
    """

    def __init__(self, config: SparseTableConfig, context: FeedForwardContext) -> None:
        super().__init__()
        width = context.hidden_size
        self.config = config
        self.gate = SparseGate(config.num_experts, width, config.top_k)
        self.table = nn.Parameter(torch.empty(config.num_experts, width))
        self.output_bias = nn.Parameter(torch.empty(width))
        self.dense: DenseFeedForward | None = None
        """The dense feed-forward that the rows scale, in a mixture of decoders."""
        self.dropout = nn.Dropout(context.dropout)
        self.own: Callable[[Selected], tuple[Tensor, Tensor]] = lambda selected: selected[:2]
        """Selects the weights and rows of a token's experts in this rank's part of the table."""
        self.mixed: Region = same
        """The sum over the ranks that share a table."""

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers: unit rows with uniformly drawn directions, and zero bias."""
        return {"table": unit_rows(), "output_bias": ZEROS}

    def forward(
        self,
        normalized_BTD: Tensor,
        residual_BTD: Tensor,
        given: BlockInput = NOTHING_ELSE,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Mixes rows for the normalized input; see `FeedForward.forward`."""
        selected: Selected = self.gate(pack(normalized_BTD.flatten(0, 1), given.real))
        mixed_MD = self.mix(selected).to(normalized_BTD.dtype)
        y_BTD = unpack(mixed_MD, given.real).view_as(normalized_BTD)
        if self.dense is not None:
            y_BTD = y_BTD * self.dense(normalized_BTD, residual_BTD)[0]
        return self.dropout(y_BTD + self.output_bias), self._statistics(selected, given.real)

    def mix(self, selected: Selected) -> Tensor:
        """Computes the weighted sums of the experts' rows, C^T a.

        Args:
            selected: The experts of each token.

        Returns:
            [M, D], at least fp32, the precision in which gradients of rows are summed.
        """
        weights_MK, ids_MK = self.own(selected)
        rows_ND = normalize(self.table.to(weights_MK.dtype), dim=1)
        return self.mixed(sum_of_rows(rows_ND, ids_MK, weights_MK, whole=self.table.is_cuda))

    def row(self, expert: int) -> Tensor:
        """Returns the normalized row of one expert [D].

        Args:
            expert: The index of the expert.
        """
        return normalize(self.table[expert], dim=0)

    def gate_columns(self) -> list[Tensor]:
        """Returns the gate's columns, [N, D]: there is one level of experts."""
        return [self.gate.weight]

    def _statistics(self, selected: Selected, real: RealTokens | None) -> RoutingStats:
        load_E = selected.load(selected.weights_NK.dtype)
        return RoutingStats(
            name="",
            load_E=load_E,
            tokens=None if real is None else real.mask_BT.sum().to(load_E.dtype),
            measures={"active": self.config.top_k * load_E.sum()} if self.measures else {},
        )


class MixtureOfDecoders(SparseTable):
    """A dense feed-forward whose output is scaled by a sparse sum of rows.

    Args:
        config: Its own configuration.
        context: Settings of the model.
    """

    def __init__(self, config: MixtureOfDecodersConfig, context: FeedForwardContext) -> None:
        width = context.hidden_size
        config = config.of_model(width=width, bias=context.bias)
        super().__init__(config, context)
        context = dataclasses.replace(context, activation=config.activation, dropout=0.0)
        dense = DenseFeedForwardConfig(hidden_size=config.inner_size(width))
        self.dense = Decoder(dense, context)


class Decoder(DenseFeedForward):
    """The dense feed-forward that the experts scale: without an output bias, its last layer
    initialized to zero.

    Until that layer has changed, only it and the output bias get a gradient. Source: Oldfield et
    al. 2025; the other layers have PyTorch's initialization.

    Args:
        config: The configuration, which sets its width.
        context: Settings of the model.
    """

    def __init__(self, config: DenseFeedForwardConfig, context: FeedForwardContext) -> None:
        super().__init__(config, context)
        start = uniform(context.hidden_size**-0.5)
        for layer in (self.gate, self.up):
            if layer is not None:
                layer.start = layer.start_bias = start
        self.down = Linear(self.down.in_features, self.down.out_features, ZEROS, bias=False)
