"""Blocks as CUDA graphs: the host launches all kernels of a block's pass together.

A small model computes faster than the host launches its kernels one by one. The first time that
blocks train, `torch.cuda.make_graphed_callables` records all of them, and from then on replays what
it recorded. Its rules decide what can be: a block takes one tensor, always of one shape, nothing in
it waits for the host or for another process, and weights stay where they are. What a pass gives is
overwritten by the next one, gradients of weights too: they are to be used before it.

Evaluation, steps that measure what records alone need, and other shapes run as without graphs.

Shapes: B batch, T tokens in a sequence, D width.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.output import RoutingStats, StatisticsModule


class _Tensors(nn.Module):
    """A block that gives tensors alone, as a graph does.

    Args:
        block: Gives the residual stream, and statistics or None.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.fields: tuple[str, ...] = ()
        """Which statistics the tensors after the first one are."""
        self.others: dict[str, Any] = {}
        """Fields of the statistics that are no tensors."""

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """The residual stream, and the statistics that the block computes."""
        y_BTD, stats = self.block(x_BTD)
        if stats is None:
            return (y_BTD,)
        found = stats._asdict()
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        self.fields = tuple(tensors)
        self.others = {name: value for name, value in found.items() if name not in tensors}
        return (y_BTD, *tensors.values())

    def named(self, tensors: tuple[Tensor, ...]) -> RoutingStats | None:
        """The statistics in what `forward` gave."""
        if not self.fields:
            return None
        named = dict(zip(self.fields, tensors[1:], strict=True))
        return RoutingStats(**(self.others | named))


class GraphedBlocks:
    """The blocks of a model in training, as graphs.

    Args:
        blocks: In their order, on a GPU.
        record: Records them for inputs like those given: `torch.cuda.make_graphed_callables`, or
            another with its arguments.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        record: Callable[..., Any] = torch.cuda.make_graphed_callables,
    ) -> None:
        self._blocks = [_Tensors(block) for block in blocks]
        self._record = record
        self._graphs: tuple[nn.Module, ...] = ()
        self._shape: torch.Size | None = None
        self._measuring = [
            module
            for block in self._blocks
            for module in block.modules()
            if isinstance(module, StatisticsModule)
        ]

    def take(self, x_BTD: Tensor) -> bool:
        """Whether this forward pass is one that is replayed, or the first of those."""
        trains = x_BTD.requires_grad and torch.is_grad_enabled() and self._blocks[0].block.training
        measures = any(module.record_is_due for module in self._measuring)
        return trains and not measures and self._shape in (None, x_BTD.shape)

    def __call__(self, x_BTD: Tensor) -> tuple[Tensor, list[RoutingStats | None]]:
        """The residual stream after the last block, and the statistics of each."""
        if not self._graphs:
            self._shape, self._graphs = x_BTD.shape, self._recorded(x_BTD)
        statistics = []
        for block, graph in zip(self._blocks, self._graphs, strict=True):
            tensors = graph(x_BTD)
            x_BTD = tensors[0]
            statistics.append(block.named(tensors))
        return x_BTD, statistics

    def _recorded(self, x_BTD: Tensor) -> tuple[nn.Module, ...]:
        """Records all blocks. Passes that come before it draw random numbers, which are drawn again
        afterwards: a run that goes on records in the middle."""
        inputs = [(x_BTD.detach().clone().requires_grad_(),) for _ in self._blocks]
        devices = [x_BTD.device] if x_BTD.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            blocks: tuple[nn.Module, ...] = self._record(
                tuple(self._blocks), tuple(inputs), allow_unused_input=True
            )
        return blocks
