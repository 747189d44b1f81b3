"""One transformer block, with pre- or post-normalization and a feed-forward of any kind, chosen by
`kind`.

To add a kind of feed-forward, write a config class and a module, and add one line to
`FEED_FORWARDS`, also in a plugin; the tests run over that registry.

Shapes: B batch, T tokens in a sequence, D width.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyad.model.attention import Attention, KeyValueCache, SelfAttention
from polyad.model.config import SectionIn
from polyad.model.cuda_graph import GraphedBlocks
from polyad.model.emoe import EmergentMoE, EmergentMoEConfig
from polyad.model.feedforward import (
    NOTHING_ELSE,
    BlockInput,
    DenseFeedForward,
    DenseFeedForwardConfig,
    FeedForward,
    FeedForwardContext,
    FeedForwardSettings,
)
from polyad.model.layers import DropPath
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.mumoe.layer import MuMoE
from polyad.model.mxd import (
    MixtureOfDecoders,
    MixtureOfDecodersConfig,
    SparseTable,
    TranscoderConfig,
)
from polyad.model.output import RoutingStats
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.layer import SparseMoE

Recompute: TypeAlias = Literal["none", "block"]


class FeedForwardKind(NamedTuple):
    """An entry of the registry of feed-forwards."""

    config: type[FeedForwardSettings]
    build: Callable[[Any, FeedForwardContext], FeedForward]
    """Takes the config class of this kind; no single type expresses that, hence Any."""


FEED_FORWARDS: dict[str, FeedForwardKind] = {
    "dense": FeedForwardKind(DenseFeedForwardConfig, DenseFeedForward),
    "mumoe": FeedForwardKind(MuMoEConfig, MuMoE),
    "smoe": FeedForwardKind(SparseMoEConfig, SparseMoE),
    "emoe": FeedForwardKind(EmergentMoEConfig, EmergentMoE),
    "mxd": FeedForwardKind(MixtureOfDecodersConfig, MixtureOfDecoders),
    "transcoder": FeedForwardKind(TranscoderConfig, SparseTable),
}

FeedForwardConfig: TypeAlias = Annotated[
    FeedForwardSettings,
    SectionIn(lambda: {kind: each.config for kind, each in FEED_FORWARDS.items()}, "dense"),
]
"""The section of a feed-forward, of any kind in the registry."""


def build_feedforward(config: FeedForwardConfig, context: FeedForwardContext) -> FeedForward:
    """Builds the feed-forward of one block, on the current default device.

    Args:
        config: The kind and its settings.
        context: Settings of the model.

    Returns:
        A module with the interface of `FeedForward`.
    """
    return FEED_FORWARDS[config.kind].build(config, context)


class Block(nn.Module):
    """Attention, then a feed-forward, both on the residual stream.

    A block does not know its index or name in the model, so `torch.compile` makes one program for
    all blocks.

    Args:
        attention: The first branch.
        feed_forward: The second branch.
        build_norm: Builds the norm of a branch.
        drop_path: Probability that a sample skips a branch (stochastic depth); None if no block of
            the model has stochastic depth.
        residual_multiplier: Factor of each branch before it is added.
    """

    def __init__(
        self,
        attention: Attention,
        feed_forward: FeedForward,
        *,
        build_norm: Callable[[], nn.Module],
        drop_path: float | None = None,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.attention_norm = build_norm()
        self.attention = attention
        self.feed_forward_norm = build_norm()
        self.feed_forward = feed_forward
        self.drop_path = DropPath(drop_path, residual_multiplier)

    def forward(
        self, x_BTD: Tensor, given: BlockInput = NOTHING_ELSE
    ) -> tuple[Tensor, RoutingStats | None]:
        """Runs both branches.

        Args:
            x_BTD: The residual stream.
            given: Further inputs.

        Returns:
            The residual stream [B, T, D] after the block, and the routing statistics.
        """
        attended_BTD, trace = self.attention(
            self.attention_norm(x_BTD),
            traced_head=self.feed_forward.attention_head(),
            cache=None if given.cache is None else given.cache.attention,
            mask_BT=given.mask_BT,
            rotation=given.rotation,
        )
        x_BTD = x_BTD + self.drop_path(attended_BTD)
        y_BTD, stats = self.feed_forward(
            self.feed_forward_norm(x_BTD), x_BTD, given._replace(attention=trace)
        )
        return x_BTD + self.drop_path(y_BTD), stats


class PostNormBlock(Block):
    """A block that normalizes the sum of each branch and its input, as in BERT."""

    def forward(
        self, x_BTD: Tensor, given: BlockInput = NOTHING_ELSE
    ) -> tuple[Tensor, RoutingStats | None]:
        """Runs both branches; see `Block.forward`. It takes no cache."""
        assert given.cache is None
        attended_BTD, trace = self.attention(
            x_BTD, traced_head=self.feed_forward.attention_head(), mask_BT=given.mask_BT
        )
        x_BTD = self.attention_norm(x_BTD + self.drop_path(attended_BTD))
        y_BTD, stats = self.feed_forward(x_BTD, x_BTD, given._replace(attention=trace))
        return self.feed_forward_norm(x_BTD + self.drop_path(y_BTD)), stats


def run_block(block: nn.Module, x_BTD: Tensor, recompute: Recompute, *others: Any) -> Any:
    """Runs a block, storing only its input if the rest is recomputed.

    Args:
        block: The block.
        x_BTD: The residual stream.
        recompute: The model's `recompute` setting.
        others: Further arguments of the block.

    Returns:
        The output of the block.
    """
    if recompute == "block" and torch.is_grad_enabled():
        # The state of the random generators is restored, so the second pass drops the same units.
        return checkpoint(block, x_BTD, *others, use_reentrant=False, preserve_rng_state=True)
    return block(x_BTD, *others)


def run_blocks(
    blocks: Iterable[nn.Module],
    x_BTD: Tensor,
    recompute: Recompute,
    given: BlockInput = NOTHING_ELSE,
    cache: KeyValueCache | None = None,
) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """Runs the blocks of a model in order.

    Args:
        blocks: The model's `blocks`.
        x_BTD: The residual stream.
        recompute: The model's `recompute` setting; nothing is recomputed without gradients.
        given: Further inputs.
        cache: In generation, keys and values of earlier tokens.

    Returns:
        The residual stream after the last block, and the statistics of the blocks that route.
    """
    graphs: GraphedBlocks | None = getattr(blocks, "graphs", None)
    if graphs is not None and cache is None and given == NOTHING_ELSE and graphs.take(x_BTD):
        x_BTD, statistics = graphs(x_BTD)
    else:
        statistics = []
        for index, block in enumerate(blocks):
            of_block = given if cache is None else given._replace(cache=cache.blocks[index])
            x_BTD, stats = run_block(block, x_BTD, recompute, of_block)
            statistics.append(stats)
    # Named here: blocks that knew their names could not share compiled code.
    routing = [
        stats._replace(name=f"blocks.{index}.feed_forward")
        for index, stats in enumerate(statistics)
        if stats is not None
    ]
    return x_BTD, tuple(routing)


def build_block(
    feed_forward: FeedForwardConfig,
    context: FeedForwardContext,
    build_norm: Callable[[], nn.Module],
    kind: type[Block] = Block,
) -> Block:
    """Builds a block whose attention has as many key heads as query heads.

    Args:
        feed_forward: The configuration of this block's feed-forward.
        context: Settings of the model, for both branches.
        build_norm: Builds the norm of a branch.
        kind: The block class, which sets the order of branches and LayerNorms.
    """
    attention, built = SelfAttention(context), build_feedforward(feed_forward, context)
    return kind(attention, built, build_norm=build_norm)
