"""The interface of the configurations of all models."""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field

from polyad.model.block import FeedForwardConfig
from polyad.model.config import Config
from polyad.model.feedforward import DenseFeedForwardConfig

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CutSizes: TypeAlias = list[dict[str, int]]
"""Sizes by their keys: of each dictionary, one has to be a multiple of the number of parts."""


class ModelSettings(Config, ABC):
    """The base of the configurations of models. A batch consists of samples."""

    embeddings: ClassVar[tuple[str, ...]] = ()
    """How the names of parameters begin that are embeddings or output heads."""

    kind: str
    """Which model this is."""
    recompute: Literal["none", "block"] = "none"
    """block: keep a block's input alone and run it again for the backward pass. Less memory, about
    a third more computation."""
    compile: bool = False
    """Whether every block runs through torch.compile."""

    def filled(self) -> Self:
        """Completed with what its own sizes decide, as a rank that matches a number of weights."""
        return self

    def units_per_sample(self) -> int:
        """What throughput counts in a sample: tokens of a text; 1 where the sample is the unit."""
        return 1

    @abstractmethod
    def flops_per_unit(self) -> int:
        """Floating-point operations of training on one unit, forward and backward.

        Returns:
            FLOPs, a multiply-add counted as two; recomputation is not counted.
        """

    @abstractmethod
    def activation_bytes(self, micro_batch_size: int, number_bytes: int) -> int:
        """A rough estimate of what the backward pass needs from the forward pass.

        Args:
            micro_batch_size: Samples in a forward pass.
            number_bytes: Bytes of a number in the precision that is trained in.

        Returns:
            Bytes.
        """

    def feed_forwards(self) -> dict[str, FeedForwardConfig]:
        """The feed-forwards of its blocks, filled in, by their keys."""
        return {}

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
