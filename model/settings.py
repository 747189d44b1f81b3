"""The interface of the configurations of all models."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyad.model.block import FeedForwardConfig
from polyad.model.config import Config, SectionError
from polyad.model.feedforward import DenseFeedForwardConfig

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CutSizes: TypeAlias = list[dict[str, int]]
"""Sizes by their keys: of each dictionary, one has to be a multiple of the number of parts."""
FEED_FORWARD = "model.feed_forward"
"""The key of the feed-forward of a model that has one kind of it."""


class ModelSettings(Config, ABC):
    """The base of the configurations of models. A batch consists of samples."""

    embeddings: ClassVar[tuple[str, ...]] = ()
    """How the names of parameters begin that are embeddings or output heads."""

    kind: str
    """The kind of model."""
    recompute: Literal["none", "block"] = "none"
    """Activation recomputation; `block`: store only the input of each block and recompute the rest
    in the backward pass, which saves memory and costs about a third more computation."""
    compile: bool = False
    """Whether blocks are compiled with torch.compile."""

    def filled(self) -> Self:
        """Completed with what its own sizes decide, as a rank that matches a number of weights."""
        return self

    def units_per_sample(self) -> int:
        """What throughput counts in a sample: tokens of a text; 1 where the sample is the unit."""
        return 1

    def random_sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A random input and its class, to plan a step of a model that a plugin brings, and to
        count its FLOPs.

        Args:
            generator: Where the numbers are drawn from.

        Returns:
            The input [...], without a dimension for the batch, and the class [].
        """
        raise NotImplementedError(f"{type(self).__name__}.random_sample")

    def feed_forwards(self) -> dict[str, FeedForwardConfig]:
        """The feed-forwards of its blocks, filled in, by their keys."""
        return {}

    def with_feed_forwards(self, sections: Mapping[str, FeedForwardConfig]) -> Self:
        """The same model with other feed-forwards.

        Args:
            sections: By keys that `feed_forwards` has.
        """
        return self.model_copy(
            update={key.removeprefix("model."): each for key, each in sections.items()}
        )

    def known_feed_forward(self) -> FeedForwardConfig:
        """The feed-forward of its blocks, filled in; of several the first with experts; that of a
        model without blocks is dense."""
        known = list(self.feed_forwards().values()) or [DenseFeedForwardConfig()]
        return next((each for each in known if each.kind != "dense"), known[0])

    def has_experts(self) -> bool:
        """Whether it chooses among experts before its head."""
        return self.known_feed_forward().kind != "dense"

    def left_to_data(self) -> str | None:
        """The key that the data has to fill in; None if there is none."""
        return None

    def training_leak(self) -> str | None:
        """What lets a prediction depend on what is to be predicted in training alone, as a key and
        its value; None: nothing does."""
        return None

    def in_words(self) -> str:
        """A short description for people."""
        return self.kind

    def block_feed_forwards(self) -> list[FeedForwardConfig]:
        """The feed-forward of each block: not every block need have the same."""
        return []

    def cut_sizes(self) -> CutSizes | None:
        """What tensor parallelism cuts; None where the model cannot be cut."""
        return None

    def last_parameter(self) -> str | None:
        """A parameter that is only there if as many layers are as the configuration says.

        Sizes in a file have no bounds: this name is looked for before anything is built.
        """
        return None


class TransformerSettings(ModelSettings, ABC):
    """The base of models whose blocks are attention and a feed-forward."""

    if TYPE_CHECKING:  # each model declares these keys: their order and their words are its own
        num_layers: int
        hidden_size: int
        num_heads: int
        feed_forward: FeedForwardConfig

    causal: ClassVar[bool] = False
    """Whether a token sees no later ones."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.hidden_size % self.num_heads and not self.heads_fit():
            nearest = max(1, round(self.hidden_size / self.num_heads)) * self.num_heads
            raise ValueError(
                f"model.hidden_size: {self.hidden_size} is not a multiple of "
                f"model.num_heads: {self.num_heads}; nearest multiple: {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _feed_forward_fits(self) -> Self:
        check_feed_forward(
            FEED_FORWARD,
            self.feed_forward,
            width=self.hidden_size,
            num_heads=self.num_heads,
            layers=self.num_layers,
            bias=self.has_bias(),
            causal=self.causal,
        )
        return self

    def heads_fit(self) -> bool:
        """Whether num_heads need not divide hidden_size: by default it has to."""
        return False

    @abstractmethod
    def has_bias(self) -> bool:
        """Whether linear layers and LayerNorms have a bias."""

    def feed_forwards(self) -> dict[str, FeedForwardConfig]:
        """The feed-forward, filled in, by its key."""
        known = self.feed_forward.of_model(width=self.hidden_size, bias=self.has_bias())
        return {FEED_FORWARD: known}

    def block_feed_forwards(self) -> list[FeedForwardConfig]:
        """The feed-forward of each block: not every block need have the same."""
        feed_forward = self.feed_forwards()[FEED_FORWARD]
        return [feed_forward.of_block(block) for block in range(self.num_layers)]

    def filled(self) -> Self:
        """Completed with the rank that follows from the number of parameters."""
        return self.with_feed_forwards(self.feed_forwards())

    def cut_sizes(self) -> CutSizes:
        """Heads, width, and the sizes of the feed-forward."""
        return [
            {"model.num_heads": self.num_heads},
            {"model.hidden_size": self.hidden_size},
            *(
                size
                for key, each in self.feed_forwards().items()
                for size in cut_sizes_of(key, each, self.hidden_size)
            ),
        ]

    def last_parameter(self) -> str:
        """A parameter of the last block."""
        return f"blocks.{self.num_layers - 1}.attention_norm.weight"


def check_feed_forward(
    key: str,
    feed_forward: FeedForwardConfig,
    *,
    width: int,
    num_heads: int | None,
    layers: int,
    bias: bool,
    causal: bool,
) -> None:
    """Checks a feed-forward against its model.

    Args:
        key: The key of its section.
        feed_forward: What the section says.
        width: The width of its input.
        num_heads: Heads of the model's attention; None without attention.
        layers: L.
        bias: Whether the model's layers have one.
        causal: Whether it is a language model.

    Raises:
        ValueError: They do not fit.
    """
    try:
        feed_forward.check_model(num_layers=layers, num_heads=num_heads, causal=causal)
        feed_forward.of_model(width=width, bias=bias)
    except SectionError as error:
        raise ValueError(error.within(key)) from None


def cut_sizes_of(key: str, feed_forward: FeedForwardConfig, width: int) -> CutSizes:
    """What tensor parallelism divides in a feed-forward, by whole keys.

    Args:
        key: The key of its section.
        feed_forward: With everything filled in.
        width: The width of its input.
    """
    return [
        {f"{key}.{name}": n for name, n in choices.items()}
        for choices in feed_forward.cut_sizes(width)
    ]
