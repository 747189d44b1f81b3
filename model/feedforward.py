"""The feed-forward of a block: chosen by `kind`, built by one function.

A new kind is a config class and a module, one member of the `FeedForwardConfig` union and one line
of `FEED_FORWARDS`; the tests run over that registry.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

from polyad.model.dense import DenseFeedForward, DenseFeedForwardConfig
from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.emoe.layer import EmergentMoE
from polyad.model.interface import FeedForward, FeedForwardContext
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.mumoe.layer import MuMoE
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.layer import SparseMoE


def _default_kind(value: object) -> object:
    """A section without a kind is dense."""
    return {"kind": "dense"} | value if isinstance(value, dict) else value


FeedForwardConfig: TypeAlias = Annotated[
    DenseFeedForwardConfig | MuMoEConfig | SparseMoEConfig | EmergentMoEConfig,
    Field(discriminator="kind"),
    BeforeValidator(_default_kind),
]

# A builder takes the config class of its kind; a single type cannot say that, hence Any.
FEED_FORWARDS: dict[str, Callable[[Any, FeedForwardContext], FeedForward]] = {
    "dense": DenseFeedForward,
    "mumoe": MuMoE,
    "smoe": SparseMoE,
    "emoe": EmergentMoE,
}


def build_feedforward(config: FeedForwardConfig, context: FeedForwardContext) -> FeedForward:
    """Builds the feed-forward of one block, on the current default device.

    Args:
        config: Which kind, and its settings.
        context: Settings of the model.

    Returns:
        A module with the interface of `FeedForward`.
    """
    return FEED_FORWARDS[config.kind](config, context)
