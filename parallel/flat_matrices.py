"""Whole matrices of flat parts, for an optimizer that takes matrices where ZeRO has cut them.

At stages 1 and 2 a process has an equal part of all numbers of a parameter group, one after the
other: of a group whose parameters are matrices of one size most matrices are whole in one part. The
others, at most one where two parts meet, are exchanged: each process adds what it has of them.
"""

from typing import Any, NamedTuple

from torch import Tensor

from polyad.parallel.regions import Group
from polyad.parallel.zero import Engine, _replica_group

PART = "part"
"""The key of an optimizer's group for the `FlatPart` that its one tensor is."""


class FlatPart(NamedTuple):
    """What a process has of a group of matrices."""

    group: Group
    """The processes that have a part each."""
    numel: int
    """Numbers of all parts, without padding at the end."""

    def whole(self, flat_P: Tensor, size: int) -> tuple[Tensor, int]:
        """The matrices that any number of this part belongs to; all processes call it.

        Args:
            flat_P: Of each number of the part, another one.
            size: Numbers of a matrix.

        Returns:
            The matrices [N, size], and where the part begins in them.
        """
        length = flat_P.numel()
        start = min(self.group.rank * length, self.numel)
        stop = min(start + length, self.numel)
        first, last = start // size, -(-stop // size)
        begin = start - first * size
        own_NS = flat_P.new_zeros(max(0, last - first), size)
        own_NS.view(-1)[begin : begin + stop - start] = flat_P[: stop - start]
        ends = [n * length for n in range(1, self.group.size) if n * length < self.numel]
        cut = sorted({end // size for end in ends if end % size})
        if cut:
            cut_NS = flat_P.new_zeros(len(cut), size)
            here = [(n, number - first) for n, number in enumerate(cut) if first <= number < last]
            for n, number in here:
                cut_NS[n] = own_NS[number]
            cut_NS = self.group.total(cut_NS)  # of what one process has and the others do not
            for n, number in here:
                own_NS[number] = cut_NS[n]
        return own_NS, begin


def name_parts(engine: Engine, groups: list[list[Any]]) -> None:
    """Tells the groups of an engine's optimizer which parts of matrices ZeRO has left them.

    Args:
        engine: of stage 1 or 2.
        groups: the parameters that its optimizer's groups had before.
    """
    for group, parameters in zip(engine.optimizer.param_groups, groups, strict=True):
        numel = sum(parameter.numel() for parameter in parameters)
        group[PART] = FlatPart(Group.of(_replica_group(parameters[0])), numel)
