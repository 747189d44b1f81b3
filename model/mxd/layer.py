"""Transcoders and mixtures of decoders as feed-forwards of a block.

    a = TopK(relu(G u + g))
    transcoder            y = C^T a + b
    mixture of decoders   y = (C^T a) * D^T phi(E^T u + e) + b

A transcoder's output is a sum of a few rows of the table C. In a mixture of decoders that sum
scales the output of a dense feed-forward channel by channel: expert n is the second layer D
diag(c_n), of full rank, at the cost of one row. This is the CP factorization of all these layers
with R = O and an identity output factor (`model/mumoe/cp.py`).

Rows of C have unit length. The authors rescale the stored rows before each step and remove the
component along a row from its gradient; here rows are normalized when read, which is the same
function with the same gradient direction, in any parallel layout and with any optimizer.

Shapes: B batch, T tokens in a sequence, M real tokens, D width, H inner width of the dense part, N
experts of all levels, K experts of a token.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, normalize

from polyad.model.feedforward import (
    NOTHING_ELSE,
    BlockInput,
    DenseFeedForward,
    DenseFeedForwardConfig,
    FeedForward,
    FeedForwardContext,
)
from polyad.model.initialization import ZEROS, Initializer, uniform, unit_rows
from polyad.model.layers import Region, same
from polyad.model.mxd.config import MixtureOfDecodersConfig, SparseTableConfig, TranscoderConfig
from polyad.model.mxd.gate import SparseGate
from polyad.model.output import RoutingStats, StatisticsModule
from polyad.model.padding import RealTokens, counted, pack, unpack
from polyad.model.smoe.selection import Selected

MULTIPLIED_WHOLE = 1024
"""Maximum number of rows of a table that a GPU multiplies as a whole."""


def sum_of_rows(rows_ND: Tensor, ids_MK: Tensor, weights_MK: Tensor, *, whole: bool) -> Tensor:
    """Computes weighted sums of a few rows of a table.

    Args:
        rows_ND: The table.
        ids_MK: Indices of the rows.
        weights_MK: Their weights.
        whole: Whether to multiply the whole table by a mostly zero weight matrix, which is faster
            on a GPU if the table is small (BENCHMARKS.md, "GPUs").

    Returns:
        [M, D].
    """
    if whole and len(rows_ND) <= MULTIPLIED_WHOLE:
        weights_MN = weights_MK.new_zeros(len(weights_MK), len(rows_ND))
        return weights_MN.scatter_add(1, ids_MK, weights_MK) @ rows_ND
    return embedding_bag(ids_MK, rows_ND, per_sample_weights=weights_MK, mode="sum")


class SparseTable(FeedForward, StatisticsModule):
    """The base class of both kinds: a sparse gate over the rows of a table.

    Args:
        config: Its own configuration, filled in.
        context: Settings of the model.
    """

    def __init__(self, config: SparseTableConfig, context: FeedForwardContext) -> None:
        super().__init__()
        width = context.hidden_size
        self.config = config
        self.gate = SparseGate(config.num_experts, width, config.top_k)
        self.table = nn.Parameter(torch.empty(config.table_rows, width))
        self.output_bias = nn.Parameter(torch.empty(width))
        self.dense: DenseFeedForward | None = None
        """The dense feed-forward that the rows scale, in a mixture of decoders."""
        self.dropout = nn.Dropout(context.dropout)
        self.own: Callable[[Selected], tuple[Tensor, Tensor]] = lambda selected: (
            selected.weights_NK,
            selected.expert_ids_NK,
        )
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
        """Returns the gate's columns for each level, [N, D]."""
        return list(self.gate.weight.split_with_sizes(self.gate.levels))

    def _statistics(self, selected: Selected, real: RealTokens | None) -> RoutingStats:
        load_E = selected.load(selected.weights_NK.dtype)
        return RoutingStats(
            name="",
            load_E=load_E,
            active=self.config.top_k * load_E.sum() if self.measures else None,
            tokens=None if real is None else counted(real, load_E.dtype),
        )


class Transcoder(SparseTable):
    """A sparse sum of output vectors.

    Args:
        config: Its own configuration.
        context: Settings of the model.
    """

    config: TranscoderConfig


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
        self.down = nn.Linear(self.down.in_features, self.down.out_features, bias=False)

    def initializers(self) -> dict[str, Initializer]:
        """Initializes the last layer to zero, and the others like PyTorch's linear layers."""
        first = uniform(self.context.hidden_size**-0.5)
        entries = dict.fromkeys(super().initializers(), first)
        return {name: each for name, each in entries.items() if "down" not in name} | {
            "down.weight": ZEROS
        }
