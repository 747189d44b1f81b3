"""The choice between fast kernels and definitions: `POLYAD_KERNELS`.

fast        the default: the fastest that the device, the precision and the installation allow
triton      as `fast`, with grouped products in Triton on a GPU: see `grouped_triton.py`
reference   the definition of every operation, in plain PyTorch
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

VARIABLE = "POLYAD_KERNELS"
WAYS = ("fast", "triton", "reference")


class KernelsError(ValueError):
    """A wrong value of the environment variable: one line."""

    exit_status = 2


def chosen_way(value: str | None) -> str:
    """Reads the variable.

    Args:
        value: Its value; None or empty: it is not set.

    Returns:
        One of `WAYS`.

    Raises:
        KernelsError: It has another value, or what it asks for is not installed.
    """
    if not value:
        return WAYS[0]
    if value not in WAYS:
        raise KernelsError(f"{VARIABLE}: {value[:200]!r} is not allowed: {', '.join(WAYS)}")
    if value == "triton" and importlib.util.find_spec("triton") is None:
        raise KernelsError(f"{VARIABLE}: triton is not allowed without the package triton")
    return value


# Read once, not in every forward pass: a process computes in one way.
_WAY = chosen_way(os.environ.get(VARIABLE))
REFERENCE = _WAY == "reference"
"""Whether every operation is computed by its definition."""
TRITON = _WAY == "triton"
"""Whether grouped products in Triton are taken where they can run."""


_has_numbers = True
_stands_in = False


@contextmanager
def without_numbers(*, on_gpu: bool = False) -> Iterator[None]:
    """A context in which tensors have shapes alone, as those of a plan: none can be read.

    Args:
        on_gpu: Whether tensors on a CPU stand for those of a GPU.
    """
    global _has_numbers, _stands_in
    _has_numbers, _stands_in = False, on_gpu
    try:
        yield
    finally:
        _has_numbers, _stands_in = True, False


def can_read() -> bool:
    """Whether what is computed may depend on numbers of tensors, as those of rows."""
    return _has_numbers


def on_cpu(x: Tensor) -> bool:
    """Whether a CPU computes with this tensor, and takes what is faster there, or needed."""
    return x.device.type == "cpu" and not _stands_in
