"""Boxes of global tensors: what a source is asked for, and what a checkpoint is made of.

A `Box` says which numbers of which tensor. A `HeldBox` (`writing.py`) has them in memory, a
`StoredBox` (`format.py`) in a file.
"""

from typing import NamedTuple

MASTER, EMA, BUFFER, RANDOM = "master", "ema", "buffer", "random"
"""Fields: a weight in fp32, its moving average, a buffer, a random generator's state. Others are
the optimizer's."""
OF_WEIGHTS = (MASTER, EMA)
"""Fields that begin as the weights: a source without averages gives the weights for them."""


class Box(NamedTuple):
    """A box of one field of a tensor, whatever layout has it."""

    name: str
    """The name of the parameter or buffer."""
    field: str
    shape: tuple[int, ...]
    """The shape of the whole tensor, without padding."""
    offset: tuple[int, ...]
    """The position of the first element."""
    size: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, field: str, shape: tuple[int, ...]) -> "Box":
        """The box that is all of a tensor."""
        return cls(name, field, shape, (0,) * len(shape), shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes the box out of the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.size, strict=True))

    @property
    def key(self) -> str:
        """The name of the box in a tensor file."""
        return f"{self.name}/{self.field}/{','.join(map(str, self.offset))}"
