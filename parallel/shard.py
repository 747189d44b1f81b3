"""How a parameter is split over ranks and padded: one description for every layer.

A shard is the part of a global tensor on one rank. Along each axis it has one run of positions or,
along the first axis, several: a column-parallel weight has one run, a fused q, k, v weight three.
Positions outside of all runs are padding, which exists only inside the layout: checkpoints and
counts exclude it. ZeRO splits shards further (`fragments.py`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyad.parallel import comm
from polyad.parallel.checkpoint.format import Box

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""

ROWS = 128
"""A part of a vocabulary is a multiple of this: other sizes are slow on a GPU."""


class Run(NamedTuple):
    """Consecutive positions of an axis."""

    here: int
    """First position in the shard."""
    length: int
    there: int
    """First position in the global tensor."""


class Axis(NamedTuple):
    """One axis of a shard."""

    size: int
    """Number of positions in the shard, including padding."""
    whole: int
    """Number of positions in the global tensor."""
    runs: tuple[Run, ...]
    """The runs in order; an axis that is not the first has one run, from 0."""

    @classmethod
    def uncut(cls, whole: int, size: int | None = None) -> "Axis":
        """Returns an axis with all positions, padded to `size`."""
        return cls(whole if size is None else size, whole, (Run(0, whole, 0),))

    @classmethod
    def part(cls, whole: int, rank: int, parts: int, fused: int = 1) -> "Axis":
        """Returns an equal part of a matrix, or of each of several matrices that are stacked.

        Args:
            whole: Total number of rows.
            rank: The index of the part.
            parts: Number of parts, which must divide the rows of a matrix.
            fused: Number of matrices (3 for q, k, v).
        """
        assert whole % (fused * parts) == 0
        rows = whole // fused
        size = rows // parts
        runs = (Run(i * size, size, i * rows + rank * size) for i in range(fused))
        return cls(fused * size, whole, tuple(runs))

    @classmethod
    def part_and_rest(cls, whole: int, cut: int, rank: int, parts: int) -> "Axis":
        """Returns an equal part of the first positions; the last part also gets the rest.

        The other parts have padding there: ZeRO's parts of replicated tensors are at the same
        places on every rank only if all ranks have equally many elements.

        Args:
            whole: Number of positions.
            cut: Number of positions that are split; `parts` divides it.
            rank: The index of the part.
            parts: Number of parts.
        """
        assert cut % parts == 0
        size, rest = cut // parts, whole - cut
        own = size + (rest if rank == parts - 1 else 0)
        return cls(size + rest, whole, (Run(0, own, rank * size),))

    @classmethod
    def part_of_vocabulary(cls, whole: int, rank: int, parts: int) -> "Axis":
        """Returns an equal part of a vocabulary, padded to a multiple of `ROWS`."""
        size = ROWS * -(-whole // (ROWS * parts))
        first = min(rank * size, whole)
        real = min(size, whole - first)
        return cls(size, whole, (Run(0, real, first),) if real else ())


@dataclass(frozen=True)
class Placement:
    """The position of a rank's shard in the global parameter, before ZeRO splits it."""

    axes: tuple[Axis, ...]
    replicated: bool
    """Whether all tensor-parallel ranks hold the same shard."""
    expert_parallel_size: int = 1
    """Number of groups of data-parallel ranks that hold different experts of it."""
    stacked: tuple[str, ...] = ()
    """For a stack of parameters along axis 2: the name of each, the last one being its own."""

    @classmethod
    def whole(cls, shape: tuple[int, ...], padded: tuple[int, ...] | None = None) -> "Placement":
        """A parameter that is not split: each rank has the whole.

        Args:
            shape: The global shape.
            padded: The shape with padding at the end of some axes; None: there is none.
        """
        return cls(tuple(map(Axis.uncut, shape, padded or shape)), True)

    @classmethod
    def cut(
        cls,
        shape: tuple[int, ...],
        axes: Mapping[int, Axis],
        *,
        replicated: bool = False,
        expert_parallel_size: int = 1,
    ) -> "Placement":
        """A parameter that is split or padded along some axes.

        Args:
            shape: The global shape.
            axes: These axes, by number.
            replicated: See `Placement`.
            expert_parallel_size: See `Placement`.
        """
        cuts = tuple(axes.get(number, Axis.uncut(size)) for number, size in enumerate(shape))
        return cls(cuts, replicated, expert_parallel_size)

    @classmethod
    def of_experts(
        cls, shape: tuple[int, ...], world: comm.World, inner: int | None
    ) -> "Placement":
        """An equal part of the experts, and an equal part of the inner units of each.

        Args:
            shape: The global shape, experts first.
            world: This rank.
            inner: The axis of the inner units; None if there are none, so that tensor parallelism
                does not split the parameter.
        """
        axes = {0: Axis.part(shape[0], world.expert_parallel_rank, world.expert_parallel_size)}
        parts = world.tensor_parallel_size
        if inner is not None:
            axes[inner] = Axis.part(shape[inner], world.tensor_parallel_rank, parts)
        replicated = inner is None or parts == 1
        return cls.cut(
            shape, axes, replicated=replicated, expert_parallel_size=world.expert_parallel_size
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard, including padding."""
        return tuple(axis.size for axis in self.axes)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the global tensor, without padding."""
        return tuple(axis.whole for axis in self.axes)

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, Extent]]:
        """Yields a row-major range of the shard's elements as boxes of the global tensor.

        Args:
            start: First element.
            stop: One past the last.

        Yields:
            (first element, (offset, size)) of each box, in order. Padding is skipped.
        """
        if not self.axes:
            yield from ((start, box) for box in boxes((), start, stop))
            return
        shape = self.shape
        row = math.prod(shape[1:])
        inner = tuple(axis.runs[0] for axis in self.axes[1:])
        for run in self.axes[0].runs:
            begin = run.here * row
            low, high = max(start, begin), min(stop, begin + run.length * row)
            for offset, size in boxes((run.length, *shape[1:]), low - begin, high - begin):
                runs = (run, *inner)
                where = tuple(each.there + first for each, first in zip(runs, offset, strict=True))
                real = tuple(
                    max(0, min(number, each.length - first))
                    for each, first, number in zip(runs, offset, size, strict=True)
                )
                if all(real):
                    yield low, (where, real)
                low += math.prod(size)

    def views(
        self, name: str, field: str, flat: Tensor, start: int
    ) -> Iterator[tuple[Box, Tensor]]:
        """Yields boxes of the global tensor, or of those that are stacked in it.

        Args:
            name: The parameter's name.
            field: What of it, for the boxes.
            flat: A range of the shard's elements, contiguous.
            start: The position of its first element in the shard.

        Yields:
            A box of a global tensor, and a view of its values.
        """
        shape, strides = self.global_shape, torch.empty(self.shape, device="meta").stride()
        for first, (offset, size) in self.boxes(start, start + flat.numel()):
            view = flat.as_strided(size, strides, flat.storage_offset() + first - start)
            if not self.stacked:
                yield Box(name, field, shape, offset, size), view
                continue
            of_one = [x[:2] + x[3:] for x in (shape, offset, size)]
            for number, part in enumerate(view.unbind(2), offset[2]):
                stem = name.removesuffix(self.stacked[-1])
                yield Box(stem + self.stacked[number], field, *of_one), part


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Extent]:
    """Splits elements start .. stop of a row-major tensor into at most 2 * dims - 1 boxes.

    Args:
        shape: The shape of the tensor; an empty one has a single element.
        start: First element.
        stop: One past the last element.

    Yields:
        (offset, size) of each box. In order, their elements are exactly start .. stop.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, rest = math.prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row  # whole rows: first .. last
    if first > last:  # inside one row
        for offset, size in boxes(rest, start - last * row, stop - last * row):
            yield (last, *offset), (1, *size)
        return
    for offset, size in boxes(rest, start - (first - 1) * row, row) if start < first * row else ():
        yield (first - 1, *offset), (1, *size)
    if first < last:
        yield (first, *[0] * len(rest)), (last - first, *rest)
    for offset, size in boxes(rest, 0, stop - last * row):
        yield (last, *offset), (1, *size)


def placement_of(parameter: nn.Parameter) -> Placement:
    """Returns the placement of a parameter: the whole tensor, unless it was split."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO 3 empties `shape`
    placement: Placement = getattr(parameter, "placement", None) or Placement.whole(shape)
    assert placement.shape == shape
    return placement


def cut(owner: nn.Module, name: str, placement: Placement) -> None:
    """Replaces a parameter by this rank's part of it.

    Args:
        owner: The module that holds it, on the meta device.
        name: The name of the parameter in that module.
        placement: The placement of the part.
    """
    with torch.device("meta"):
        part = nn.Parameter(torch.empty(placement.shape))
    part.placement = placement  # type: ignore[attr-defined]
    # DeepSpeed reads these attributes: they determine the ranks that sum a gradient and a norm.
    if not placement.replicated:
        part.tensor_model_parallel = True  # type: ignore[attr-defined]
    if placement.expert_parallel_size > 1:
        part.allreduce = False  # type: ignore[attr-defined]
        part.group_name = group_name(placement.expert_parallel_size)  # type: ignore[attr-defined]
    setattr(owner, name, part)


def group_name(expert_parallel_size: int) -> str:
    """Returns DeepSpeed's name for the groups of ranks that share a set of experts."""
    return f"ep_size_{expert_parallel_size}"
