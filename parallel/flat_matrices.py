"""Reassembles whole matrices from ZeRO's flat parts, for an optimizer that needs matrices.

In stages 1 and 2 a rank has an equal part of all elements of a parameter group, laid end to end. In
a group of equally sized matrices most matrices are whole in one part. The others, at most one where
two parts meet, are all-reduced from the pieces of each rank.
"""

from typing import Any, NamedTuple

from torch import Tensor

from polyad.parallel.regions import Group
from polyad.parallel.zero import Engine, replica_group

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
