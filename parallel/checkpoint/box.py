"""Boxes of global tensors: the units in which sources are read and checkpoints are stored.

A `Box` selects elements of a tensor. A `HeldBox` (`writing.py`) has their values in memory, a
`StoredBox` (`format.py`) in a file.
"""

from typing import NamedTuple

MASTER, EMA, BUFFER, RANDOM = "master", "ema", "buffer", "random"
"""Fields: a weight in fp32, its moving average, a buffer, a random generator's state. All other
fields are the optimizer's."""
OF_WEIGHTS = (MASTER, EMA)
"""Fields that start as the weights: a source without averages returns the weights for them."""


class Box(NamedTuple):
    """A box of one field of a tensor, independent of the layout."""

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
        """Returns the box that is a whole tensor."""
        return cls(name, field, shape, (0,) * len(shape), shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the box in the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.size, strict=True))

    @property
    def key(self) -> str:
        """The name of the box in a tensor file."""
        return f"{self.name}/{self.field}/{','.join(map(str, self.offset))}"
