"""Blocks as CUDA graphs: the CPU launches all kernels of a block's pass at once.

A small model computes faster than the CPU can launch its kernels one by one. In the first training
pass, `torch.cuda.make_graphed_callables` records all blocks, and later passes replay the graphs.
Graphs impose conditions: a block takes one tensor of fixed shape, nothing in it waits for the CPU
or another process, and weights stay at their addresses. The outputs of a pass, including gradients
of weights, are overwritten by the next pass and must be used before it.

Evaluation, steps that compute values needed only by records, and other shapes run without graphs.

Shapes: B batch, T tokens in a sequence, D width.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.output import RoutingStats, StatisticsModule


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
    """The blocks of a model in training, as graphs.

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
