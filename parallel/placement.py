"""Which part of a global tensor a process's shard holds.

A shard is made of pieces: runs of its rows (the first dimension), each of them a box of the global
tensor. A column-parallel weight is one piece, a fused q, k, v weight three; rows in no piece, and
what is behind the inner sizes, are padding, which exists inside the layout alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""


@dataclass(frozen=True)
class Piece:
    """Rows first_row .. first_row + num_rows of a shard."""

    first_row: int
    num_rows: int
    origin: tuple[int, ...]
    """Position of its first element in the global tensor."""


ROWS = 128
"""A part of a vocabulary is a multiple of this: products of other sizes are slow on a GPU."""


@dataclass(frozen=True)
class Placement:
    """A shard of a parameter in the global tensor.

    Args:
        shape: of the shard, padding included.
        global_shape: of the whole, without padding.
        pieces: in the order of their rows.
        replicated: whether each tensor-parallel process holds the same.
        expert_parallel_size: groups of data-parallel processes that hold different experts of it.
    """

    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replicated: bool
    expert_parallel_size: int = 1
    inner: tuple[int, ...] | None = None
    """Sizes of the axes but the first without padding; None: nothing is padded there."""

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Placement":
        """The placement of a parameter that is not cut: each process has the whole, before ZeRO."""
        rows = shape[0] if shape else 1
        return cls(shape, shape, (Piece(0, rows, (0,) * len(shape)),), True)

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        """A row-major range of the shard's elements as boxes of the global tensor.

        Args:
            start: first element.
            stop: one past the last.

        Yields:
            (first element, (offset, size)) of each box, in order. Padding is left out.
        """
        row = math.prod(self.shape[1:])
        for piece in self.pieces:
            begin = piece.first_row * row
            low, high = max(start, begin), min(stop, begin + piece.num_rows * row)
            inside = (piece.num_rows, *self.shape[1:]) if self.shape else ()
            for offset, size in boxes(inside, low - begin, high - begin):
                where = tuple(a + b for a, b in zip(piece.origin, offset, strict=True))
                real = self._without_padding(offset, size)
                if all(real):
                    yield low, (where, real)
                low += math.prod(size)

    def _without_padding(self, offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
        if self.inner is None:
            return size
        ends = zip(offset[1:], size[1:], self.inner, strict=True)
        return (size[0], *(max(0, min(n, end - first)) for first, n, end in ends))

    def values(self, flat: Tensor, first: int, size: tuple[int, ...]) -> Tensor:
        """A box of the shard, in place.

        Args:
            flat: elements of the shard, contiguous.
            first: the box's first element there.
            size: of the box, as `boxes` gives it.
        """
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return flat.as_strided(size, strides, flat.storage_offset() + first)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Splits elements start .. stop of a row-major tensor into at most 2 * dims - 1 boxes.

    Args:
        shape: of the tensor; an empty one has a single element.
        start: first element.
        stop: one past the last element.

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


def padded(shape: tuple[int, ...], global_shape: tuple[int, ...]) -> Placement:
    """A parameter that is not cut, with padding at the end of any axes.

    Args:
        shape: with the padding.
        global_shape: without.
    """
    piece = Piece(0, global_shape[0], (0,) * len(shape))
    return Placement(shape, global_shape, (piece,), True, inner=global_shape[1:])


def split_columns(shape: tuple[int, ...], axis: int, rank: int, parts: int) -> Placement:
    """An equal part along one axis.

    Args:
        shape: global.
        axis: which one; its size is divisible by `parts`.
        rank: which part.
        parts: how many.
    """
    assert shape[axis] % parts == 0
    size = shape[axis] // parts
    shard = (*shape[:axis], size, *shape[axis + 1 :])
    origin = tuple(rank * size if i == axis else 0 for i in range(len(shape)))
    return Placement(shard, shape, (Piece(0, shard[0], origin),), False)


def split_fused(shape: tuple[int, ...], fused: int, rank: int, parts: int) -> Placement:
    """An equal part of each of several matrices that are stored on top of one another.

    Args:
        shape: global, rows first.
        fused: how many matrices (3 for q, k, v).
        rank: which part.
        parts: how many.
    """
    whole = shape[0] // fused
    size, rest = whole // parts, shape[1:]
    pieces = tuple(
        Piece(i * size, size, (i * whole + rank * size, *[0] * len(rest))) for i in range(fused)
    )
    return Placement((fused * size, *rest), shape, pieces, False)


def split_rows_and_rest(shape: tuple[int, ...], rows: int, rank: int, parts: int) -> Placement:
    """An equal part of the first rows; the rows below them go to the last part.

    The others have padding there: ZeRO's parts of what is replicated fall in the same places on
    every process only if all of them have as many numbers.

    Args:
        shape: global.
        rows: how many are cut; divisible by `parts`.
        rank: which part.
        parts: how many.
    """
    assert rows % parts == 0
    size, below, rest = rows // parts, shape[0] - rows, shape[1:]
    mine = size + (below if rank == parts - 1 else 0)
    origin = (rank * size, *[0] * len(rest))
    return Placement((size + below, *rest), shape, (Piece(0, mine, origin),), False)


def split_padded(shape: tuple[int, ...], rank: int, parts: int) -> Placement:
    """An equal number of rows, a multiple of `ROWS`, the last ones padding.

    Args:
        shape: global.
        rank: which part.
        parts: how many.
    """
    size, rest = ROWS * -(-shape[0] // (ROWS * parts)), shape[1:]
    first = min(rank * size, shape[0])
    real = min(size, shape[0] - first)
    pieces = (Piece(0, real, (first, *[0] * len(rest))),) if real else ()
    return Placement((size, *rest), shape, pieces, False)


def split_experts(
    shape: tuple[int, ...],
    *,
    expert_rank: int,
    expert_parts: int,
    inner_axis: int,
    inner_rank: int,
    inner_parts: int,
) -> Placement:
    """An equal part of the experts, and of each an equal part of its inner units.

    Args:
        shape: global, experts first.
        expert_rank: which part of the experts.
        expert_parts: how many.
        inner_axis: that of the inner units.
        inner_rank: which part of them.
        inner_parts: how many.
    """
    part = split_columns(shape, inner_axis, inner_rank, inner_parts)
    size = shape[0] // expert_parts
    origin = (expert_rank * size, *part.pieces[0].origin[1:])
    return Placement(
        (size, *part.shape[1:]), shape, (Piece(0, size, origin),), inner_parts == 1, expert_parts
    )


def placement_of(parameter: nn.Parameter) -> Placement:
    """Where a parameter's shard lies in the global tensor; the whole, unless it was cut."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO 3 empties `shape`
    placement: Placement = getattr(parameter, "placement", None) or Placement.whole(shape)
    assert placement.shape == shape
    return placement


def cut(parameter: nn.Parameter, placement: Placement) -> None:
    """Marks a parameter as this process's part of a global tensor.

    Args:
        parameter: of the shard's shape.
        placement: the shard in the global tensor.
    """
    parameter.placement = placement  # type: ignore[attr-defined]
    # DeepSpeed reads this attribute: the norm of such a parameter is summed over the processes.
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
