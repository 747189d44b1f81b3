"""Blocks as CUDA graphs: the host launches all kernels of a block's pass together.

A small model computes faster than the host launches its kernels one by one. The first time that
blocks train, `torch.cuda.make_graphed_callables` records all of them, and from then on replays what
it recorded. Its rules decide what can be: a block takes one tensor, always of one shape, nothing in
it waits for the host or for another process, and weights stay where they are. What a pass gives is
overwritten by the next one, gradients of weights too: they are to be used before it.

Evaluation, steps that measure what records alone need, and other shapes run as without graphs.

Shapes: B batch, T tokens in a sequence, D width.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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

    def with_weights(self, x_BTD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Runs `forward` with its weights as inputs, so that a graph knows of them."""
        return self(x_BTD)  # type: ignore[no-any-return]

    def named(self, tensors: tuple[Tensor, ...]) -> RoutingStats | None:
        """The statistics in what `forward` gave."""
        if not self.fields:
            return None
        named = dict(zip(self.fields, tensors[1:], strict=True))
        return RoutingStats(**(self.others | named))


@contextmanager
def _stand_ins(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Puts others in the same memory in place of the parameters of modules, for a while.

    Optimizers that hook into a parameter keep the node by which autograd hands over its gradient,
    and with it the stream of that time. A backward pass has that stream wait for its own, which a
    stream that is being recorded does not allow.
    """
    places = [module._parameters for module in modules]
    before = [dict(place) for place in places]
    given = dict.fromkeys(p for place in before for p in place.values() if p is not None)
    others = {p: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in given}
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
        blocks: In their order, on a GPU.
        record: Records functions of tensors for inputs like those given:
            `torch.cuda.make_graphed_callables`, or another with its arguments.
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
            tensors = graph(x_BTD, *block.parameters())
            x_BTD = tensors[0]
            statistics.append(block.named(tensors))
        return x_BTD, statistics

    def _recorded(self, x_BTD: Tensor) -> tuple[Callable[..., tuple[Tensor, ...]], ...]:
        """Records all blocks, as functions of the residual stream and their weights. Passes that
        come before it draw random numbers, which are drawn again afterwards: a run that goes on
        records in the middle."""
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
