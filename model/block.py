"""One transformer block, with pre- or post-normalization and a feed-forward of any kind, chosen by
`kind`.

To add a kind of feed-forward, write a config class and a module, and add one line to
`FEED_FORWARDS`, also in a plugin; the tests run over that registry.

Shapes: B batch, T tokens in a sequence, D width.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyad.model.attention import Attention, KeyValueCache, SelfAttention
from polyad.model.config import SectionIn
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
from polyad.model.output import RoutingStats, StatisticsModule
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
    *,
    attention_std: float | None = None,
    drop_path: float | None = None,
    kind: type[Block] = Block,
) -> Block:
    """Builds a block whose attention has as many key heads as query heads.

    Args:
        feed_forward: The configuration of this block's feed-forward.
        context: Settings of the model, for both branches.
        build_norm: Builds the norm of a branch.
        attention_std: Standard deviation of the initial weights of attention; None: as in the
            feed-forward.
        drop_path: See `Block`.
        kind: The block class, which sets the order of branches and LayerNorms.
    """
    of_attention = context
    if attention_std is not None:
        std = attention_std
        of_attention = dataclasses.replace(context, initializer_std=std, residual_std=std)
    return kind(
        SelfAttention(of_attention),
        build_feedforward(feed_forward, context),
        build_norm=build_norm,
        drop_path=drop_path,
    )


class _Tensors(nn.Module):
    """A block whose outputs are tensors only, as a graph requires.

    Args:
        block: The block, which returns the residual stream, and statistics or None.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.stats: RoutingStats | None = None
        """Statistics as they were captured, whose tensors are those after the first one."""

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Returns the residual stream, and the statistics that the block computes."""
        y_BTD, stats = self.block(x_BTD)
        if stats is None:
            return (y_BTD,)
        tensors = stats.tensors()
        self.stats = stats.with_tensors({name: x.detach() for name, x in tensors.items()})
        return (y_BTD, *tensors.values())

    def with_weights(self, x_BTD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Runs `forward` with the weights as inputs, so that they are inputs of the graph."""
        return self(x_BTD)  # type: ignore[no-any-return]

    def named(self, tensors: tuple[Tensor, ...]) -> RoutingStats | None:
        """Rebuilds the statistics from the output of `forward`."""
        if self.stats is None:
            return None
        return self.stats.with_tensors(dict(zip(self.stats.tensors(), tensors[1:], strict=True)))


@contextmanager
def _stand_ins(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Temporarily replaces the parameters of modules by others that share their memory.

    Optimizers that hook into a parameter keep alive the autograd node that accumulates its
    gradient, and with it the CUDA stream on which it was made. A backward pass makes that stream
    wait for its own stream, which is not allowed for a stream that is being captured.
    """
    places = [module._parameters for module in modules]
    before = [dict(place) for place in places]
    parameters = dict.fromkeys(p for place in before for p in place.values() if p is not None)
    others = {p: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in parameters}
    try:
        for place in places:
            place.update({name: others[p] for name, p in place.items() if p is not None})
        yield
    finally:
        for place, own in zip(places, before, strict=True):
            place.update(own)


class GraphedBlocks:
    """The blocks of a model in training as CUDA graphs: the CPU launches all kernels of a block's
    pass at once.

    A small model computes faster than the CPU can launch its kernels one by one. In the first
    training pass, `torch.cuda.make_graphed_callables` records all blocks, and later passes replay
    the graphs. Graphs impose conditions: a block takes one tensor of fixed shape, nothing in it
    waits for the CPU or another process, and weights stay at their addresses. The outputs of a
    pass, including gradients of weights, are overwritten by the next pass and must be used before
    it.

    Evaluation, steps that compute values needed only by records, and other shapes run without
    graphs.

    Args:
        blocks: The blocks in order, on a GPU.
        record: Captures functions of tensors for sample inputs:
            `torch.cuda.make_graphed_callables`, or another function with the same arguments.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        record: Callable[..., Any] = torch.cuda.make_graphed_callables,
    ) -> None:
        self._blocks = [_Tensors(block) for block in blocks]
        self._record = record
        self._graphs: tuple[Callable[..., tuple[Tensor, ...]], ...] = ()
        self._shape: torch.Size | None = None
        self._measuring = [
            module
            for block in self._blocks
            for module in block.modules()
            if isinstance(module, StatisticsModule)
        ]

    def take(self, x_BTD: Tensor) -> bool:
        """Returns whether this forward pass is replayed, or is the first one and gets captured."""
        trains = x_BTD.requires_grad and torch.is_grad_enabled() and self._blocks[0].block.training
        measures = any(module.record_is_due for module in self._measuring)
        return trains and not measures and self._shape in (None, x_BTD.shape)

    def __call__(self, x_BTD: Tensor) -> tuple[Tensor, list[RoutingStats | None]]:
        """Returns the residual stream after the last block, and the statistics of each block."""
        if not self._graphs:
            self._shape, self._graphs = x_BTD.shape, self._recorded(x_BTD)
        statistics = []
        for block, graph in zip(self._blocks, self._graphs, strict=True):
            tensors = graph(x_BTD, *block.parameters())
            x_BTD = tensors[0]
            statistics.append(block.named(tensors))
        return x_BTD, statistics

    def _recorded(self, x_BTD: Tensor) -> tuple[Callable[..., tuple[Tensor, ...]], ...]:
        """Captures all blocks, as functions of the residual stream and their weights. The warm-up
        passes draw random numbers, so the state of the generators is restored afterwards: a resumed
        run captures in the middle."""
        devices = [x_BTD.device] if x_BTD.is_cuda else []
        modules = [module for block in self._blocks for module in block.modules()]
        with _stand_ins(modules), torch.random.fork_rng(devices=devices):
            inputs = tuple(
                (x_BTD.detach().clone().requires_grad_(), *block.parameters())
                for block in self._blocks
            )
            graphs: tuple[Callable[..., tuple[Tensor, ...]], ...] = self._record(
                tuple(block.with_weights for block in self._blocks),
                inputs,
                allow_unused_input=True,
            )
        return graphs
