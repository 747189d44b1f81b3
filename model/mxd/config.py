"""The keys of a mixture of decoders and of a transcoder, and what follows from them."""

import math
from abc import ABC
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from polyad.model.config import Count, SectionError
from polyad.model.feedforward import (
    GATED,
    Activation,
    DenseFeedForwardConfig,
    FeedForwardSettings,
    GatedActivation,
)
from polyad.model.mumoe.config import Levels

MATCH_DENSE: Literal["match-dense"] = "match-dense"


def check_size(value: object) -> object:
    """Checks a parsed width before pydantic, whose error for a union lists every member's."""
    if value not in (None, MATCH_DENSE) and (type(value) is not int or value < 1):
        raise ValueError("1 or more, match-dense or null")
    return value


class SparseTableConfig(FeedForwardSettings, ABC):
    """The keys that a mixture of decoders and a transcoder share."""

    num_experts: Levels = (1024,)
    """Number of experts N, as a list: [1024] gives each expert its own score; [147, 147] uses
    product keys, where an expert's score is the sum of one score per level (21,609 experts at the
    cost of 294)."""
    top_k: Count = 32
    """Number of experts K that each token keeps: those with the highest scores, and only scores
    above 0."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_k > self.table_rows:
            raise SectionError(
                f"@top_k: {self.top_k} is more than the {self.table_rows} experts of @num_experts: "
                f"{list(self.num_experts)}"
            )
        return self

    @property
    def table_rows(self) -> int:
        """Total number of experts N over all levels."""
        return math.prod(self.num_experts)

    def gate_parameters(self, width: int) -> int:
        """Counts the parameters of the gate and its bias, the table, and the output bias.

        Args:
            width: D.
        """
        return sum(self.num_experts) * (width + 1) + self.table_rows * width + width


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
        return self.table_rows

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """Returns the number of experts, which tensor parallelism splits."""
        return [{"num_experts": self.table_rows}]

    def parameters(self, width: int) -> int:
        """Counts the parameters of a block's feed-forward.

        Args:
            width: D.
        """
        return self.gate_parameters(width)


class MixtureOfDecodersConfig(SparseTableConfig):
    """A dense feed-forward whose output is scaled, channel by channel, by a few of very many
    experts.

    Source: Oldfield et al. 2025, "Towards interpretability without sacrifice: faithful dense layer
    decomposition with mixture of decoders".
    """

    kind: Literal["mxd"] = "mxd"
    """The kind of feed-forward."""
    hidden_size: Annotated[Count | Literal["match-dense"] | None, BeforeValidator(check_size)] = (
        None
    )
    """Inner width H of the dense part, in units; null: four times the model's width; `match-dense`:
    the width at which the block has the parameter count closest to a dense block with four times
    the model's width (a gated one if this one is gated)."""
    activation: Activation | GatedActivation = "gelu_tanh"
    """Activation of the dense part, that of the feed-forward which it replaces: `gelu_tanh`,
    `gelu`, `quick_gelu`, or with a gate `swiglu`, `geglu`, `clamped_swiglu`."""

    def inner_size(self, width: int) -> int:
        """Returns the inner width H of the dense part, once it is a number."""
        assert self.hidden_size != MATCH_DENSE, "of_model() fills it in"
        return self._dense().inner_size(width)

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """Returns the numbers of experts and inner units, which tensor parallelism splits."""
        return [{"num_experts": self.table_rows}, {"hidden_size": self.inner_size(width)}]

    def parameters(self, width: int, bias: bool) -> int:
        """Counts the parameters of a block's feed-forward.

        Args:
            width: D.
            bias: Whether the dense part's first layer has a bias.
        """
        dense = self._dense().parameters(width, bias, self.activation in GATED)
        return self.gate_parameters(width) + dense - bias * width

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
                f"{list(self.num_experts)}: even with one inner unit the block has {smallest:,} "
                f"parameters, but the dense one only {dense:,}; use fewer experts, or give a "
                "number"
            )
        of_unit = (2 + gated) * width + bias * (1 + gated)
        size = 1 + round((dense - smallest) / of_unit)
        return self.model_copy(update={"hidden_size": size})

    def _dense(self) -> DenseFeedForwardConfig:
        assert self.hidden_size != MATCH_DENSE
        return DenseFeedForwardConfig(hidden_size=self.hidden_size)
