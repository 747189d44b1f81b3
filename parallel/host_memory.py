"""Settings of glibc's malloc for training on a CPU: freed memory is kept for reuse."""

import ctypes
import gc
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's malloc.h."""
OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Environment variables by which the user sets malloc; then nothing is changed."""
LARGEST = 2**31 - 1
"""Bytes of a block that is kept: what `mallopt` can be told."""


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory for later allocations, and not return it to the system.

    torch has no allocator of its own on a CPU. Every activation and gradient above 32 MiB, and in
    a process that has freed none yet above 128 KiB, is a mapping of its own, which the system fills
    with zeros page by page each time: up to half of the time of a training step. A process then
    holds its peak until it ends, and a little more for the gaps (BENCHMARKS.md has figures).

    Does nothing without glibc, or where the environment has a variable of `OF_THE_USER` or
    `GLIBC_TUNABLES` of malloc.

    Returns:
        Whether malloc was changed.
    """
    if sys.platform != "linux" or any(name in os.environ for name in OF_THE_USER):
        return False
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    # -1: nothing is ever given back at the end of the heap.
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def give_back_freed_memory() -> None:
    """Returns kept memory to the system, so that later allocations do not meet a fragmented heap.

    Does nothing without glibc.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
