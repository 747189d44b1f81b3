"""Where our weights are in the files of another library, as rules that are independent of sizes.

Rules of modules, whose weight and bias keep their names:

    "wte"                            the same tensor under another name
    transposed("attn.c_attn")        [in, out] there, [out, in] here
    rows("query", "key", "value")    several there, one here: stacked by rows

Rules of single parameters:

    parameter("cls_token", 1)        the same tensor with another axis of size 1
    half("input_linear.weight", 0)   one there, several here: the first half of its outputs
    every_other("gate_up_proj", 0)   the same, with the outputs of both interleaved
    per_expert("experts.{expert}.w1.weight")   one per expert there, one for all here

The same rule is used to read and write: it maps a box of ours to a box of theirs, and theirs to a
view in our orientation. No files are opened here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import Tensor

Shape: TypeAlias = tuple[int, ...]
Slices: TypeAlias = tuple[slice, ...]
EXPERT = "{expert}"
"""Placeholder for the number of an expert in a name."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Share:
    """Our part of an axis of a fused tensor."""

    axis: int
    """The axis of the fused tensor, negative: -1 is the last."""
    index: int
    count: int
    """Number of our weights that share the tensor, all of one size."""
    in_turns: bool
    """Whether their rows or columns are interleaved, rather than in consecutive blocks."""


@dataclass(frozen=True)
class Rule:
    """How a weight of ours is stored."""

    names: tuple[str, ...]
    """Names of the tensors there; our rows are theirs, concatenated."""
    of_module: bool = False
    """Whether the rule is for a module: names then lack the parameter's own name."""
    transposed: bool = False
    """Whether the last two axes are swapped there; vectors are unchanged."""
    leading: int = 0
    """Number of leading axes of size 1 that theirs have in addition; negative: fewer."""
    share: Share | None = None
    """The part of each tensor that is ours; None for all."""
    optional: bool = False
    """Whether the files may lack it; it is then zero."""

    def pieces(self, shape: Shape) -> Iterator["Piece"]:
        """Yields the tensors there, in the order of our rows.

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
    """A tensor there, or a share of one, and the rows of our weight that it contains."""

    name: str
    first_row: int
    size: Shape
    """The shape of these rows of ours."""
    rule: Rule

    @property
    def rows(self) -> slice:
        """The rows of our weight that it contains."""
        return slice(self.first_row, self.first_row + self.size[0])

    @property
    def shape(self) -> Shape:
        """The full shape of the tensor there."""
        sizes = self._as_there(self.size, 1)
        if share := self.rule.share:
            sizes[share.axis] *= share.count
        return tuple(sizes)

    def box(self, slices: Slices) -> Slices:
        """Maps a box of our rows to a box of the tensor there.

        Args:
            slices: Slices of our rows, each with both ends.
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
        """Returns a view in our orientation of a box of the tensor there.

        Args:
            box: The box that `box` selects.
            size: The size of our box.
        """
        return (box.mT if self._is_transposed(box.ndim) else box).view(size)

    def write(self, stored: Tensor, value: Tensor) -> None:
        """Fills this piece's share of a tensor there.

        Args:
            stored: The whole tensor.
            value: Our whole weight.
        """
        box = stored[self.box(tuple(slice(0, n) for n in self.size))]
        self.in_our_form(box, self.size).copy_(value[self.rows])

    def _as_there(self, ours: Sequence[_T], one: _T) -> list[_T]:
        """Reorders values for our axes to theirs; `one` is the value for an axis of size 1."""
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
    """Several tensors of one shape there, one here, such as queries, keys and values."""
    return Rule(names, of_module=True)


def parameter(name: str, leading: int = 0, *, optional: bool = False) -> Rule:
    """A single tensor; see `Rule` for the possible differences."""
    return Rule((name,), leading=leading, optional=optional)


def half(name: str, index: int, *, is_transposed: bool = False) -> Rule:
    """The first or second half of the outputs of a fused tensor.

    Args:
        name: Its name there, where outputs are rows: [..., out, in].
        index: 0 or 1.
        is_transposed: Whether ours is [..., in, out].
    """
    return Rule((name,), transposed=is_transposed, share=Share(-2, index, 2, in_turns=False))


def every_other(name: str, index: int) -> Rule:
    """The even or odd outputs of a fused tensor; outputs are the last axis on both sides.

    Args:
        name: Its name there.
        index: 0 for the even ones, 1 for the odd ones.
    """
    return Rule((name,), share=Share(-1, index, 2, in_turns=True))


def per_expert(name: str) -> Rule:
    """One matrix [out, in] per expert there, [experts, in, out] here.

    Args:
        name: The name, containing `EXPERT`.
    """
    return Rule((name,), transposed=True, leading=-1)
