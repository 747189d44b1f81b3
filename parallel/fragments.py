"""Fills this rank's part of a model, and determines which part of it the rank writes.

A fragment (`zero.py`) is a row-major range of one parameter's elements. Together the fragments of
all ranks cover every parameter.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.build import buffers_changed
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import MASTER
from polyad.parallel.regions import Group
from polyad.parallel.shard import Placement
from polyad.parallel.source import Source
from polyad.parallel.zero import Engine, Fragment, fragments, own_range, refresh, replica_group


@torch.no_grad()
def fill(engine: Engine, source: Source) -> None:
    """Sets master weights, optimizer state and step counters, then the weights of the forward pass.

    Every rank reads only the boxes of its own fragments.

    Args:
        engine: the engine whose weights are set.
        source: the source of the values.
    """
    engine.about_to_change()
    held = fragments(engine)
    for name, fragment in held.items():
        _read(fragment, source)
        if fragment.counter is not None:
            fragment.counter.fill_(source.step(name))
    refresh(engine, [*held.values(), *_fill_frozen(engine, source)])
    for name, buffer in persistent_buffers(engine.module):
        buffer.copy_(source.buffer(name))
    buffers_changed(engine.module)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers that belong to a model's state, by name; every rank has them whole."""
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if name not in submodule._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _fill_frozen(engine: Engine, source: Source) -> Iterator[Fragment]:
    """Sets frozen weights, which have no masters, and keeps those that this rank writes.

    Yields:
        This rank's part of each; in stage 3 the weights themselves are set in `refresh`.
    """
    named = [(n, p) for n, p in engine.module.named_parameters() if not p.requires_grad]
    engine.frozen.clear()
    for number, (name, parameter) in enumerate(named):
        start, values = 0, parameter.detach().view(-1)
        if engine.stage == 3:
            start, stop = own_range(parameter)
            values = torch.zeros(max(0, stop - start), device=engine.device)
        own = Fragment(name, parameter, start, {MASTER: values})
        _read(own, source)
        yield own
        if name in engine.left_out or not _is_written_here(engine.world, number, own.placement):
            continue
        if engine.stage == 3 or parameter.dtype != torch.float32:
            values = torch.zeros(math.prod(own.placement.shape))  # on the CPU: it is only stored
            own = Fragment(name, parameter, 0, {MASTER: values})
            _read(own, source)
        engine.frozen.append(own)


def _read(fragment: Fragment, source: Source) -> None:
    """Sets the elements of a fragment to the values of a source."""
    for box, view in fragment.boxes():
        view.copy_(source.read(box))


def _is_written_here(world: comm.World, number: int, placement: Placement) -> bool:
    """Returns whether this rank writes a frozen weight: each whole, by one rank that has it."""
    parts = placement.expert_parallel_size
    rank, copies = world.data_parallel_rank // parts, world.data_parallel_size // parts
    is_first = not placement.replicated or world.tensor_parallel_rank == 0
    return is_first and number % copies == rank


def written(engine: Engine) -> Iterator[Fragment]:
    """Yields what this rank writes to a checkpoint of weights and optimizer state.

    ZeRO leaves one copy of the optimizer's state in each tensor-parallel rank. Parameters that
    tensor parallelism does not split, which are small, are on every such rank: the first one writes
    them. So each element is written by exactly one rank.
    """
    is_first = engine.world.tensor_parallel_rank == 0
    for fragment in fragments(engine).values():
        if is_first or not fragment.placement.replicated:
            yield fragment
    yield from engine.frozen


# Whole matrices of the flat parts that stages 1 and 2 leave, for an optimizer that needs matrices:
# a rank has an equal part of all elements of a parameter group, laid end to end. In a group of
# equally sized matrices most are whole in one part; the others, at most one where two parts meet,
# are all-reduced from the pieces of each rank.

PART = "part"
"""The key in an optimizer's parameter group for the `FlatPart` of its only tensor."""


class Edge(NamedTuple):
    """A matrix that spans several parts."""

    whole_S: Tensor
    here: slice
    """Its elements in this part."""
    there: slice
    """The positions of these elements in the matrix."""


class FlatPart(NamedTuple):
    """A rank's part of a group of matrices."""

    group: Group
    """The ranks that have a part each."""
    numel: int
    """Number of elements of all parts, without padding at the end."""

    def inner(self, flat_P: Tensor, size: int) -> Tensor:
        """Returns the matrices that are whole in this part, as a view [N, size].

        Args:
            flat_P: A flat tensor with one value per element of the part.
            size: Number of elements of a matrix.
        """
        start, stop = self._range(flat_P)
        first, last = -(-start // size), stop // size
        if first >= last:
            return flat_P[:0].view(0, size)
        return flat_P[first * size - start : last * size - start].view(-1, size)

    def edges(self, flat_P: Tensor, size: int) -> list[Edge]:
        """Returns the matrices that span this part and others; all ranks call it.

        Args:
            flat_P: As in `inner`.
            size: Number of elements of a matrix.
        """
        start, stop = self._range(flat_P)
        ends = [n * flat_P.numel() for n in range(1, self.group.size)]
        cut = sorted({end // size for end in ends if end % size and end < self.numel})
        if not cut:
            return []
        cut_NS, mine = flat_P.new_zeros(len(cut), size), list[tuple[int, slice, slice]]()
        for number, matrix in enumerate(cut):
            begin = matrix * size
            low, high = max(start, begin), min(stop, begin + size)
            if low < high:
                here, there = slice(low - start, high - start), slice(low - begin, high - begin)
                cut_NS[number, there] = flat_P[here]
                mine.append((number, here, there))
        cut_NS = self.group.total(cut_NS)  # each element from the one rank that has it
        return [Edge(cut_NS[number], here, there) for number, here, there in mine]

    def _range(self, flat_P: Tensor) -> tuple[int, int]:
        """Returns the range of all elements that is in this part: first, one past the last."""
        start = min(self.group.rank * flat_P.numel(), self.numel)
        return start, min(start + flat_P.numel(), self.numel)


def name_parts(engine: Engine, groups: list[list[Any]]) -> None:
    """Adds to an engine's optimizer groups which parts of matrices ZeRO has left them.

    Args:
        engine: an engine of stage 1 or 2.
        groups: the parameters of the optimizer's groups before ZeRO.
    """
    for group, parameters in zip(engine.optimizer.param_groups, groups, strict=True):
        numel = sum(parameter.numel() for parameter in parameters)
        group[PART] = FlatPart(Group.of(replica_group(parameters[0])), numel)
