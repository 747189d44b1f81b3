"""The choice between fast kernels and definitions: `POLYAD_KERNELS`.

fast        the default: the fastest that the device, the precision and the installation support
reference   the reference implementation of every operation, in plain PyTorch
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

VARIABLE = "POLYAD_KERNELS"
WAYS = ("fast", "reference")


class KernelsError(ValueError):
    """An invalid value of the environment variable: a one-line error."""

    exit_status = 2


# Read once, not in every forward pass: a process always uses one implementation.
_way = os.environ.get(VARIABLE) or WAYS[0]
if _way not in WAYS:
    raise KernelsError(f"{VARIABLE}: {_way[:200]!r} is not allowed: {', '.join(WAYS)}")
REFERENCE = _way == "reference"
"""Whether every operation uses its reference implementation."""


_has_numbers = True
_stands_in = _compiled = False


@contextmanager
def without_numbers(*, on_gpu: bool = False, compiled: bool = False) -> Iterator[None]:
    """A context in which tensors have only shapes, as in a plan; their values cannot be read.

    Args:
        on_gpu: Whether tensors on a CPU stand for tensors on a GPU.
        compiled: Whether operations stand for a GPU's compiled ones.
    """
    global _has_numbers, _stands_in, _compiled
    _has_numbers, _stands_in, _compiled = False, on_gpu, on_gpu and compiled
    try:
        yield
    finally:
        _has_numbers, _stands_in, _compiled = True, False, False


def can_read() -> bool:
    """Returns whether the computation may depend on values of tensors, such as numbers of rows."""
    return _has_numbers


def on_cpu(x: Tensor) -> bool:
    """Returns whether a tensor is on a CPU, where other implementations are faster or needed."""
    return x.device.type == "cpu" and not _stands_in


def compiled_on_gpu(x: Tensor) -> bool:
    """Returns whether a tensor's operations are compiled for a GPU, or stand for such."""
    return _compiled or (x.is_cuda and torch.compiler.is_compiling())
