"""The interface of all model configurations."""

from abc import ABC
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyad.model.block import FeedForwardConfig
from polyad.model.config import Config, Count, SectionError
from polyad.model.feedforward import DenseFeedForwardConfig, FeedForwardContext
from polyad.model.layers import LayerNorm

CutSizes: TypeAlias = list[dict[str, int]]
"""Sizes by key: in each dictionary, one must be a multiple of the number of ranks."""
FEED_FORWARD = "model.feed_forward"
"""The key of the feed-forward in a model with a single kind."""
C = TypeVar("C", bound=Config)


class ModelSettings(Config, ABC):
    """The base class of model configurations. A batch consists of samples."""

    causal: ClassVar[bool] = False
    """Whether tokens do not attend to later tokens."""

    if TYPE_CHECKING:  # models with blocks declare these keys, in their own order and words
        num_layers: int
        hidden_size: int
        dropout: float
        layer_norm_epsilon: float

    kind: str
    """The kind of model."""
    recompute: Literal["none", "block"] = "none"
    """Activation recomputation; `block`: store only the input of each block and recompute the rest
    in the backward pass, which saves memory and costs about a third more computation."""
    compile: bool = False
    """Whether blocks are compiled with torch.compile."""

    def filled(self) -> Self:
        """Returns a copy with derived values filled in, such as the rank for a parameter count."""
        return self.with_feed_forwards(self.feed_forwards())

    def units_per_sample(self) -> int:
        """Number of units per sample for throughput: tokens of a text, or 1 for whole samples."""
        return 1

    def random_sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws a random input and its class, for planning a step of a plugin's model and counting
        its FLOPs.

        Args:
            generator: The random generator.

        Returns:
            The input [...], without a batch dimension, and the class [].
        """
        raise NotImplementedError(f"{type(self).__name__}.random_sample")

    def feed_forward_widths(self) -> dict[str, int]:
        """The widths of the inputs of the blocks' feed-forwards, by the keys of their sections."""
        return {}

    def feed_forwards(self) -> dict[str, FeedForwardConfig]:
        """The feed-forwards of the blocks, with all defaults filled in, by key."""
        return {
            key: self._section(key).of_model(width=width, bias=self.has_bias())
            for key, width in self.feed_forward_widths().items()
        }

    def with_feed_forwards(self, sections: Mapping[str, FeedForwardConfig]) -> Self:
        """Returns the same model with other feed-forwards.

        Args:
            sections: Feed-forwards by key; the keys are those of `feed_forwards`.
        """
        config = self
        for key, each in sections.items():
            config = _replaced(config, key.split(".")[1:], each)
        return config

    def has_bias(self) -> bool:
        """Whether linear layers and LayerNorms have a bias; True unless a key `bias` says so."""
        return getattr(self, "bias", True)

    def context(
        self, std: float, residual_std: float | None = None, width: int | None = None
    ) -> FeedForwardContext:
        """Returns the settings that the feed-forward of a block receives.

        Args:
            std: Standard deviation of initial weights.
            residual_std: That of weights before the residual stream; None: the same.
            width: The width of its input and output; None: hidden_size.
        """
        return FeedForwardContext(
            hidden_size=width or self.hidden_size,
            bias=self.has_bias(),
            dropout=self.dropout,
            initializer_std=std,
            residual_std=residual_std or std,
            num_heads=getattr(self, "num_heads", None),
            activation=getattr(self, "activation", "gelu_tanh"),
            causal=self.causal,
        )

    def build_norm(self) -> nn.Module:
        """Builds a norm of the residual stream, on the current default device."""
        return LayerNorm(self.hidden_size, eps=self.layer_norm_epsilon, bias=self.has_bias())

    def check_feed_forwards(self) -> None:
        """Checks the feed-forwards against this model.

        Raises:
            ValueError: A section does not fit the model.
        """
        num_heads = getattr(self, "num_heads", None)
        for key, width in self.feed_forward_widths().items():
            section = self._section(key)
            try:
                section.check_model(
                    num_layers=self.num_layers, num_heads=num_heads, causal=self.causal
                )
                section.of_model(width=width, bias=self.has_bias())
            except SectionError as error:
                raise ValueError(error.within(key)) from None

    def _section(self, key: str) -> FeedForwardConfig:
        section: FeedForwardConfig = attrgetter(key.removeprefix("model."))(self)
        return section

    def known_feed_forward(self) -> FeedForwardConfig:
        """The feed-forward of the blocks, filled in; if there are several, the first with experts.
        A model without blocks counts as dense."""
        sections = list(self.feed_forwards().values()) or [DenseFeedForwardConfig()]
        return next((each for each in sections if each.kind != "dense"), sections[0])

    def has_experts(self) -> bool:
        """Returns whether the model chooses among experts before its head."""
        return self.known_feed_forward().kind != "dense"

    def from_data(self) -> dict[str, int | None]:
        """The values that the data determines unless they are given, by key; None if not known
        yet."""
        return {}

    def left_to_data(self) -> str | None:
        """The first key whose value the data has yet to determine; None if there is none."""
        unset = (f"model.{key}" for key, value in self.from_data().items() if value is None)
        return next(unset, None)

    def number(self, key: str) -> int:
        """Returns one of the values in `from_data`, which must have been filled in.

        Raises:
            ValueError: It is not known yet.
        """
        value = self.from_data()[key]
        if value is None:
            raise ValueError(f"model.{key} is not set: give a number, or take it from the data")
        return value

    def in_words(self) -> str:
        """Describes the model briefly for the user."""
        return self.kind

    def block_feed_forwards(self) -> list[FeedForwardConfig]:
        """The feed-forward of each block; blocks may differ."""
        return []

    def cut_sizes(self) -> CutSizes | None:
        """The sizes that tensor parallelism splits; None if the model does not support it."""
        return None

    def feed_forward_cut_sizes(self) -> CutSizes:
        """The sizes that tensor parallelism splits in the feed-forwards, by full key."""
        widths = self.feed_forward_widths()
        return [
            {f"{key}.{name}": size for name, size in choices.items()}
            for key, each in self.feed_forwards().items()
            for choices in each.cut_sizes(widths[key])
        ]


def _replaced(config: C, path: Sequence[str], section: Config) -> C:
    """Returns a copy of a configuration with another section at a path of keys."""
    name, *rest = path
    value = _replaced(getattr(config, name), rest, section) if rest else section
    return config.model_copy(update={name: value})


class TransformerSettings(ModelSettings, ABC):
    """The base class of models whose blocks have attention and a feed-forward."""

    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 12
    """Number of transformer blocks L."""
    hidden_size: Count = 768
    """Width D of the residual stream, in units; a multiple of num_heads, unless the heads of a
    decoder have another size."""
    num_heads: Count = 12
    """Number of attention heads; of query heads, if keys have fewer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability for the embeddings, the attention weights and the output of every
    residual branch."""
    feed_forward: FeedForwardConfig = DenseFeedForwardConfig()
    """The feed-forward layer of every block; with a mixture of experts, some blocks can stay
    dense."""

    if TYPE_CHECKING:  # models of text declare it
        sequence_length: int

    @model_validator(mode="after")
    def _heads_and_feed_forward_fit(self) -> Self:
        if self.hidden_size % self.num_heads and not self.heads_fit():
            nearest = max(1, round(self.hidden_size / self.num_heads)) * self.num_heads
            raise ValueError(
                f"model.hidden_size: {self.hidden_size} is not a multiple of "
                f"model.num_heads: {self.num_heads}; nearest multiple: {nearest}"
            )
        self.check_feed_forwards()
        return self

    def check_length(self, length: int) -> None:
        """Checks a number of tokens of a sequence.

        Raises:
            ValueError: A model of text reads fewer.
        """
        if length > self.sequence_length:
            raise ValueError(
                f"input of {length} tokens; model.sequence_length allows at most "
                f"{self.sequence_length}"
            )

    def heads_fit(self) -> bool:
        """Whether num_heads is free; by default it must divide hidden_size."""
        return False

    def feed_forward_widths(self) -> dict[str, int]:
        """The width of the residual stream."""
        return {FEED_FORWARD: self.hidden_size}

    def block_feed_forwards(self) -> list[FeedForwardConfig]:
        """The feed-forward of each block; blocks may differ."""
        feed_forward = self.feed_forwards()[FEED_FORWARD]
        return [feed_forward.of_block(block) for block in range(self.num_layers)]

    def cut_sizes(self) -> CutSizes:
        """Heads, width, and the sizes of the feed-forward."""
        return [
            {"model.num_heads": self.num_heads},
            {"model.hidden_size": self.hidden_size},
            *self.feed_forward_cut_sizes(),
        ]
