"""GELU of experts on a CPU, and its derivative.

    h s(h)        s = sigmoid(2 sqrt(2/pi) (h + 0.044715 h^3))

which is its form with tanh; PyTorch's own in that form has no fast tanh.

Shapes: m rows, F inner width.
"""

import functools
import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

BLOCK_NUMBERS = 2**16
"""The most numbers of a block for each thread. Its buffers stay in the cache."""
TABLE_THREADS = 2
"""With more threads it is computed: PyTorch reads a table with one."""
SLOPE, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


class Gelu(Protocol):
    """Both directions, into memory that is there."""

    def forward(self, inner_mF: Tensor, active_mF: Tensor) -> None:
        """Writes the activation of the inner rows; there may be more rows to write to."""

    def backward(self, inner_mF: Tensor, active_mF: Tensor, change_mF: Tensor) -> None:
        """Writes the activation, and turns its gradient into that of the inner rows."""


def gelu_for(like: Tensor) -> Gelu:
    """The faster of both.

    Args:
        like: Of the rows' dtype and width.
    """
    reads = like.dtype == torch.bfloat16 and torch.get_num_threads() <= TABLE_THREADS
    return TableGelu() if reads else BlockGelu(like)


class TableGelu:
    """Read from a table: there are 65,536 numbers in bf16. Half of the time of computing it."""

    def __init__(self) -> None:
        self.values, self.slopes = _tables()
        self.bits = torch.empty(BLOCK_NUMBERS, dtype=torch.int32)
        self.slope, self.change = torch.empty(2, BLOCK_NUMBERS)

    def forward(self, inner_mF: Tensor, active_mF: Tensor) -> None:
        """See `Gelu.forward`."""
        for inner, active in _blocks(BLOCK_NUMBERS, inner_mF, active_mF):
            torch.index_select(self.values, 0, self._bits(inner), out=active)

    def backward(self, inner_mF: Tensor, active_mF: Tensor, change_mF: Tensor) -> None:
        """See `Gelu.backward`."""
        for inner, active, change in _blocks(BLOCK_NUMBERS, inner_mF, active_mF, change_mF):
            bits = self._bits(inner)
            torch.index_select(self.values, 0, bits, out=active)
            slope = torch.index_select(self.slopes, 0, bits, out=self.slope[: len(bits)])
            # In fp32, so that the product is rounded once.
            change.copy_(slope.mul_(self.change[: len(bits)].copy_(change)))

    def _bits(self, inner: Tensor) -> Tensor:
        """The place of each number in a table."""
        return self.bits[: len(inner)].copy_(inner.view(torch.uint16))


@functools.cache
def _tables() -> tuple[Tensor, Tensor]:
    """GELU of every number in bf16, in bf16, and its derivative, in fp32; by the number's bits."""
    with torch.inference_mode(mode=False):
        bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
        h = bits.view(torch.bfloat16).double()
        share = torch.sigmoid(SLOPE * h * (1 + CUBIC * h.square()))
        slope = share + h * share * (1 - share) * SLOPE * (1 + 3 * CUBIC * h.square())
        return (h * share).bfloat16(), slope.float()


def _blocks(size: int, inner_mF: Tensor, *others_mF: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat blocks of the inner rows, and of as many of the others."""
    whole = (inner_mF, *(other[: len(inner_mF)] for other in others_mF))
    return zip(*(torch.split(tensor.view(-1), size) for tensor in whole), strict=True)


class BlockGelu:
    """Computed, in blocks whose buffers stay in the cache; in bf16 all of it in fp32.

    Args:
        like: Of the rows' dtype and width.
    """

    def __init__(self, like: Tensor) -> None:
        self.rows = max(1, BLOCK_NUMBERS * torch.get_num_threads() // like.shape[1])
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self.buffers = torch.empty(4, self.rows, like.shape[1], dtype=self.dtype)
        self.slope = torch.tensor(SLOPE, dtype=self.dtype)

    def forward(self, inner_mF: Tensor, active_mF: Tensor) -> None:
        """See `Gelu.forward`."""
        for inner, active in self._blocks(inner_mF, active_mF):
            wide, share, _ = self._share(inner)
            active.copy_(share.mul_(wide))

    def backward(self, inner_mF: Tensor, active_mF: Tensor, change_mF: Tensor) -> None:
        """See `Gelu.backward`."""
        for inner, active, change in self._blocks(inner_mF, active_mF, change_mF):
            wide, share, square = self._share(inner)
            value = torch.mul(wide, share, out=self.buffers[3, : len(inner)])
            active.copy_(value)
            # d/dh (h s) = s + h s (1 - s) 2 sqrt(2/pi) (1 + 3 * 0.044715 h^2)
            torch.add(self.slope, square, alpha=3 * SLOPE * CUBIC, out=square)
            value.addcmul_(value, share, value=-1)
            torch.addcmul(share, value, square, out=value)
            change.copy_(value.mul_(self._read(change, 0)))

    def _share(self, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h in the wider dtype, s and h^2, the last two in buffers."""
        wide = self._read(inner, 0)
        share, square = self.buffers[1:3, : len(inner)]
        torch.mul(wide, wide, out=square)
        torch.add(self.slope, square, alpha=SLOPE * CUBIC, out=share).mul_(wide).sigmoid_()
        return wide, share, square

    def _read(self, narrow: Tensor, buffer: int) -> Tensor:
        """In the wider dtype: an operation between dtypes takes twice as long as a copy and it."""
        same = narrow.dtype == self.dtype
        return narrow if same else self.buffers[buffer, : len(narrow)].copy_(narrow)

    def _blocks(self, inner_mF: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        parts = math.ceil(len(inner_mF) / self.rows)  # of nearly the same size
        whole = (inner_mF, *(other[: len(inner_mF)] for other in others))
        return zip(*(tensor.chunk(parts) for tensor in whole), strict=True)
