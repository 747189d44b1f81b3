"""A feed-forward, a router's score and a graph as a plugin adds them, in one file.

`POLYAD_PLUGINS=tests.helpers.plugged`. The last lines register them.

Shapes: B batch, T tokens, D width, N tokens of all samples, E experts.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from polyad.model.block import FEED_FORWARDS, FeedForwardKind
from polyad.model.feedforward import (
    NOTHING_ELSE,
    BlockInput,
    FeedForward,
    FeedForwardContext,
    FeedForwardSettings,
)
from polyad.model.initialization import ONES, Initializer
from polyad.model.output import RoutingStats
from polyad.model.smoe.graph import GRAPHS, SimilarityGraph
from polyad.model.smoe.router import SCORES, LinearScore


class ScaledConfig(FeedForwardSettings):
    """A feed-forward with a factor for each unit of the residual stream."""

    kind: Literal["scaled"] = "scaled"
    """The kind of feed-forward."""
    factor: float = 2.0
    """Factor of the output."""

    def inner_size(self, width: int) -> int:
        return width

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        return []


class Scaled(FeedForward):
    def __init__(self, config: ScaledConfig, context: FeedForwardContext) -> None:
        super().__init__()
        self.factor = config.factor
        self.scale = nn.Parameter(torch.empty(context.hidden_size))

    def initializers(self) -> dict[str, Initializer]:
        return {"scale": ONES}

    def forward(
        self, normalized_BTD: Tensor, residual_BTD: Tensor, given: BlockInput = NOTHING_ELSE
    ) -> tuple[Tensor, RoutingStats | None]:
        return self.factor * self.scale * normalized_BTD, None


FEED_FORWARDS["scaled"] = FeedForwardKind(ScaledConfig, Scaled)
SCORES["halved"] = lambda config, context: Halved(config, context, bias=False)
GRAPHS["itself"] = SimilarityGraph


class Halved(LinearScore):
    def forward(self, u_ND: Tensor) -> Tensor:
        return super().forward(u_ND) / 2
