"""Where a weight of ours is in the files of another library, as a rule without sizes.

Rules of modules, whose weight and bias keep their names:

    "wte"                            the same tensor under another name
    transposed("attn.c_attn")        [in, out] there, [out, in] here
    rows("query", "key", "value")    several there, one here: one's rows after the other's

Rules of single parameters:

    parameter("cls_token", 1)        the same tensor with another axis of size 1
    half("input_linear.weight", 0)   one there, several here: the first half of its outputs
    every_other("gate_up_proj", 0)   the same, where the outputs of two take turns
    per_expert("experts.{expert}.w1.weight")   one for each expert there, all in one here

The same rule reads and writes: it maps a box of ours to a box of theirs, and theirs to a view in
our orientation. Nothing here opens a file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import Tensor

Shape: TypeAlias = tuple[int, ...]
Slices: TypeAlias = tuple[slice, ...]
EXPERT = "{expert}"
"""Stands for the number of an expert in a name."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Share:
    """Which part of an axis of a fused tensor is ours."""

    axis: int
    """The axis of the fused tensor, counted from the last: -1."""
    index: int
    count: int
    """Weights of ours that share the tensor, all of one size."""
    in_turns: bool
    """Whether their rows or columns take turns; false: they are blocks, one after the other."""


@dataclass(frozen=True)
class Rule:
    """How a weight of ours is stored."""

    names: tuple[str, ...]
    """Names of the tensors there: our rows are theirs, one after the other."""
    of_module: bool = False
    """Whether it is that of a module: names are without the parameter's own."""
    transposed: bool = False
    """Whether the last two axes are swapped there; a vector is as it is."""
    leading: int = 0
    """Axes of size 1 that theirs have more in front of ours; negative: fewer."""
    share: Share | None = None
    """Which part of each tensor it is; None: all."""
    optional: bool = False
    """Whether the files may lack it: it is zero then."""

    def pieces(self, shape: Shape) -> Iterator["Piece"]:
        """The tensors there, in the order of our rows.

        Args:
            shape: The shape of our weight.
        """
        names = self.names
        if EXPERT in names[0]:
            experts = range(shape[0])
            names = tuple(name.replace(EXPERT, str(e)) for e in experts for name in names)
        rows = shape[0] // len(names)
        for number, name in enumerate(names):
            yield Piece(name, number * rows, (rows, *shape[1:]), self)


@dataclass(frozen=True)
class Piece:
    """A tensor there, or the share of one, and the rows of our weight that it holds."""

    name: str
    first_row: int
    size: Shape
    """The shape of these rows of ours."""
    rule: Rule

    @property
    def rows(self) -> slice:
        """Its rows of our weight."""
        return slice(self.first_row, self.first_row + self.size[0])

    @property
    def shape(self) -> Shape:
        """The shape of the tensor there, whole."""
        sizes = self._as_there(self.size, 1)
        if share := self.rule.share:
            sizes[share.axis] *= share.count
        return tuple(sizes)

    def box(self, slices: Slices) -> Slices:
        """Where a box is in the tensor there.

        Args:
            slices: Slices of these rows of ours, each with both ends.
        """
        there = self._as_there(slices, slice(0, 1))
        if share := self.rule.share:
            size = self._as_there(self.size, 1)[share.axis]
            start, stop = there[share.axis].start, there[share.axis].stop
            if share.in_turns:
                last = share.count * (stop - 1) + share.index
                there[share.axis] = slice(share.count * start + share.index, last + 1, share.count)
            else:
                before = share.index * size
                there[share.axis] = slice(before + start, before + stop)
        return tuple(there)

    def in_our_form(self, box: Tensor, size: Shape) -> Tensor:
        """A view of a box of the tensor there.

        Args:
            box: As `box` cut it out.
            size: The size of our box.
        """
        return (box.mT if self._is_transposed(box.ndim) else box).view(size)

    def write(self, stored: Tensor, value: Tensor) -> None:
        """Fills this piece's share of a tensor there.

        Args:
            stored: The tensor, whole.
            value: Our weight, whole.
        """
        box = stored[self.box(tuple(slice(0, n) for n in self.size))]
        self.in_our_form(box, self.size).copy_(value[self.rows])

    def _as_there(self, ours: Sequence[_T], one: _T) -> list[_T]:
        """What belongs to our axes, in the order of theirs; `one` is of an axis of size 1."""
        leading = self.rule.leading
        there = [*[one] * leading, *ours[max(0, -leading) :]]
        if self._is_transposed(len(there)):
            there[-2], there[-1] = there[-1], there[-2]
        return there

    def _is_transposed(self, axes: int) -> bool:
        return self.rule.transposed and axes > 1


def transposed(name: str) -> Rule:
    """A linear layer that stores its weight as [in, out]."""
    return Rule((name,), of_module=True, transposed=True)


def rows(*names: str) -> Rule:
    """Several tensors there that are one here, as queries, keys and values; all have one shape."""
    return Rule(names, of_module=True)


def parameter(name: str, leading: int = 0, *, optional: bool = False) -> Rule:
    """A single tensor; see `Rule` for what may differ."""
    return Rule((name,), leading=leading, optional=optional)


def half(name: str, index: int, *, is_transposed: bool = False) -> Rule:
    """The first or second half of the outputs of a fused tensor.

    Args:
        name: There, where outputs are rows: [..., out, in].
        index: 0 or 1.
        is_transposed: Whether ours is [..., in, out].
    """
    return Rule((name,), transposed=is_transposed, share=Share(-2, index, 2, in_turns=False))


def every_other(name: str, index: int) -> Rule:
    """The even or odd outputs of a fused tensor, whose last axis they are, as ours.

    Args:
        name: There.
        index: 0 for the even ones, 1 for the odd ones.
    """
    return Rule((name,), share=Share(-1, index, 2, in_turns=True))


def per_expert(name: str) -> Rule:
    """One matrix [out, in] for each expert there, and [experts, in, out] here.

    Args:
        name: With `EXPERT` in it.
    """
    return Rule((name,), transposed=True, leading=-1)
