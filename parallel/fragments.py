"""Fills this rank's part of a model, and determines which part of it the rank writes.

A fragment (`zero.py`) is a row-major range of one parameter's elements. Together the fragments of
all ranks cover every parameter.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.build import buffers_changed
from polyad.parallel.checkpoint.format import MASTER, Box
from polyad.parallel.regions import Group
from polyad.parallel.shard import Placement, placement_of
from polyad.parallel.source import Source
from polyad.parallel.zero import Engine, Fragment, fragments, own_range, refresh, replica_group


@torch.no_grad()
def fill(engine: Engine, source: Source, *, frozen: bool = True) -> None:
    """Sets master weights, optimizer state and step counters, then the weights of the forward pass.

    Every rank reads only the boxes of its own fragments.

    Args:
        engine: the engine whose weights are set.
        source: the source of the values.
        frozen: whether to set frozen weights too, which have no masters and never change.
    """
    engine.about_to_change()
    held = fragments(engine)
    for name, fragment in held.items():
        for field, flat in fragment.values.items():
            _read_range(flat, name, field, fragment.placement, fragment.start, source)
        if fragment.counter is not None:
            fragment.counter.fill_(source.step(name))
    refresh(engine, held, _fill_frozen(engine, source) if frozen else [])
    for name, buffer in persistent_buffers(engine.module):
        buffer.copy_(source.buffer(name))
    buffers_changed(engine.module)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers that belong to a model's state, by name; every rank has them whole."""
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if name not in submodule._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _fill_frozen(engine: Engine, source: Source) -> list[tuple[Any, torch.Tensor]]:
    """Sets frozen weights, which have no masters, and keeps those that this rank writes.

    Returns:
        In stage 3, where weights are set in `refresh`: parameters, and the values of this rank's
        part of each.
    """
    parts: list[tuple[Any, torch.Tensor]] = []
    named = [(n, p) for n, p in engine.module.named_parameters() if not p.requires_grad]
    owned = _owned_frozen(engine, named)
    engine.frozen.clear()
    for name, parameter in named:
        placement = placement_of(parameter)
        whole = math.prod(placement.shape)
        if engine.stage == 3:
            start, stop = own_range(parameter)
            part = torch.zeros(max(0, stop - start), device=engine.device)
            _read_range(part, name, MASTER, placement, start, source)
            parts.append((parameter, part))
        else:
            _read_range(parameter.detach().view(-1), name, MASTER, placement, 0, source)
        if name in owned:
            exact = engine.stage < 3 and parameter.dtype == torch.float32
            if exact:
                engine.frozen[name] = parameter.detach().view(-1)
            else:
                engine.frozen[name] = torch.zeros(whole)  # on the CPU: it is only stored
                _read_range(engine.frozen[name], name, MASTER, placement, 0, source)
    return parts


def _read_range(
    flat: torch.Tensor, name: str, field: str, placement: Placement, start: int, source: Source
) -> None:
    """Sets elements of a shard, from `start` on, to the values of a source."""
    for each, shape, (offset, size), view in placement.views(name, flat, start):
        view.copy_(source.read(Box(each, field, shape, offset, size)))


def _owned_frozen(engine: Engine, named: Sequence[tuple[str, nn.Parameter]]) -> set[str]:
    """Returns the frozen weights that this rank writes: each whole, by one rank that has it."""
    world, owned = engine.world, set[str]()
    for number, (name, parameter) in enumerate(named):
        placement = placement_of(parameter)
        parts = placement.expert_parallel_size
        rank, copies = world.data_parallel_rank // parts, world.data_parallel_size // parts
        is_first = not placement.replicated or world.tensor_parallel_rank == 0
        if is_first and number % copies == rank and name not in engine.left_out:
            owned.add(name)
    return owned


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
    for name, parameter in engine.module.named_parameters():
        if (flat := engine.frozen.get(name)) is not None:
            yield Fragment(
                name=name,
                parameter=parameter,
                placement=placement_of(parameter),
                start=0,
                numel=flat.numel(),
                values={MASTER: flat},
                counter=None,
            )


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
