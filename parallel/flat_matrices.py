"""Whole matrices of flat parts, for an optimizer that takes matrices where ZeRO has cut them.

At stages 1 and 2 a process has an equal part of all numbers of a parameter group, one after the
other: of a group whose parameters are matrices of one size most matrices are whole in one part. The
others, at most one where two parts meet, are exchanged: each process adds what it has of them.
"""

from typing import Any, NamedTuple

from torch import Tensor

from polyad.parallel.regions import Group
from polyad.parallel.zero import Engine, replica_group

PART = "part"
"""The key of an optimizer's group for the `FlatPart` that its one tensor is."""


class Edge(NamedTuple):
    """A matrix that several parts have some of."""

    whole_S: Tensor
    here: slice
    """Its numbers in this part."""
    there: slice
    """The elements within the matrix."""


class FlatPart(NamedTuple):
    """What a process has of a group of matrices."""

    group: Group
    """The processes that have a part each."""
    numel: int
    """Numbers of all parts, without padding at the end."""

    def inner(self, flat_P: Tensor, size: int) -> Tensor:
        """The matrices that lie in this part whole: a view [N, size].

        Args:
            flat_P: Of each number of the part, another one.
            size: Numbers of a matrix.
        """
        start, stop = self._range(flat_P)
        first, last = -(-start // size), stop // size
        if first >= last:
            return flat_P[:0].view(0, size)
        return flat_P[first * size - start : last * size - start].view(-1, size)

    def edges(self, flat_P: Tensor, size: int) -> list[Edge]:
        """The matrices that lie in this part and in others; all processes call it.

        Args:
            flat_P: As for `inner`.
            size: Numbers of a matrix.
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
        cut_NS = self.group.total(cut_NS)  # of what one process has and the others do not
        return [Edge(cut_NS[number], here, there) for number, here, there in mine]

    def _range(self, flat_P: Tensor) -> tuple[int, int]:
        """The numbers of all parts that are this one's: first, one past the last."""
        start = min(self.group.rank * flat_P.numel(), self.numel)
        return start, min(start + flat_P.numel(), self.numel)


def name_parts(engine: Engine, groups: list[list[Any]]) -> None:
    """Tells the groups of an engine's optimizer which parts of matrices ZeRO has left them.

    Args:
        engine: of stage 1 or 2.
        groups: the parameters that its optimizer's groups had before.
    """
    for group, parameters in zip(engine.optimizer.param_groups, groups, strict=True):
        numel = sum(parameter.numel() for parameter in parameters)
        group[PART] = FlatPart(Group.of(replica_group(parameters[0])), numel)
