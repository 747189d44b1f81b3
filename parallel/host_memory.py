"""Memory of this machine: how much a process may still take; settings of glibc's malloc for
training on a CPU, by which freed memory is kept for reuse."""

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

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


def keep_few_products() -> None:
    """Makes oneDNN keep few compiled products, if it has compiled none so far.

    It compiles one for each number of rows, of which experts have many, and keeps 1,024: gigabytes
    in bf16, since each takes from 1 MB with few rows to 14 MB with 900.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")


def give_back_freed_memory() -> None:
    """Returns kept memory to the system, so that later allocations do not meet a fragmented heap.

    Does nothing without glibc.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least of what the machine, its control groups and
    its own limits (`ulimit -v`, `ulimit -d`) leave. Swap does not count, and the page cache does.

    Args:
        root: of the file system that is asked for control groups.
    """
    import psutil  # not at the top: commands that need no numbers start faster without it

    process = psutil.Process().memory_info()
    left = [psutil.virtual_memory().available, *_left_by_groups(root)]
    for limit, used in ((resource.RLIMIT_AS, process.vms), (resource.RLIMIT_DATA, process.data)):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            left.append(most - used)
    return max(0, min(left))


_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""Where version 2 and version 1 of control groups have the limit and the use of memory, and what
their statistics of a group with all below it begin with."""


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each control group above this process leaves of its limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        for kind, (place, limit, used, begins) in _GROUPS.items():
            if kind not in controllers.split(","):
                continue
            top = root / place
            folder = top / name.lstrip("/")
            # In a container the names may be those of the host, and its own group is at the top.
            for group in (folder, *folder.parents):
                if not group.is_relative_to(top):
                    break
                try:
                    most = int((group / limit).read_text())
                    taken = int((group / used).read_text())
                    stat = dict(each.split() for each in (group / "memory.stat").open())
                except (OSError, ValueError):  # no such group, or `max`: no limit
                    continue
                cache = sum(int(stat.get(f"{begins}{k}_file", 0)) for k in ("active", "inactive"))
                yield most - taken + cache
