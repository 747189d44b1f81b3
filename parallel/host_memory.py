"""Memory of this machine: how much a process may still allocate, and settings of glibc's malloc
that keep freed memory for reuse when training on a CPU."""

import ctypes
import os
import resource
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's malloc.h."""
OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Environment variables with which the user configures malloc; then nothing is changed."""
LARGEST = 2**31 - 1
"""Maximum size of a block that is kept, in bytes: the limit of `mallopt`."""
USUAL = 2**17
"""glibc's default of both thresholds, in bytes."""


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory for later allocations instead of returning it to the system.

    torch has no allocator of its own on a CPU. Every activation and gradient above 32 MiB, and
    above 128 KiB in a process that has not freed any yet, is a separate mapping, which the system
    fills with zeros page by page each time: up to half of the time of a training step. With this
    setting a process keeps its peak memory until it ends, and slightly more because of
    fragmentation (BENCHMARKS.md has figures).

    Does nothing without glibc, or if the environment has a variable in `OF_THE_USER` or malloc
    settings in `GLIBC_TUNABLES`.

    Returns:
        Whether malloc was configured.
    """
    # -1: memory at the end of the heap is never returned.
    return _configure_malloc((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, -1))


def return_freed_memory() -> bool:
    """Undoes `keep_freed_memory`: large blocks are separate mappings again, returned when freed.

    For a model larger than memory, whose blocks are read one after the other: in a heap that keeps
    everything, what small tensors leave between the large ones would be lost.
    """
    return _configure_malloc((M_MMAP_THRESHOLD, USUAL), (M_TRIM_THRESHOLD, USUAL))


def _configure_malloc(*options: tuple[int, int]) -> bool:
    if sys.platform != "linux" or any(name in os.environ for name in OF_THE_USER):
        return False
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(*option) for option in options)


def keep_few_products() -> None:
    """Limits how many compiled products oneDNN keeps, if it has not compiled any yet.

    It compiles one per number of rows, of which experts have many, and keeps 1,024 by default:
    gigabytes in bf16, since each takes from 1 MB with few rows to 14 MB with 900.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")


def free_memory(root: Path = Path("/")) -> int:
    """Returns how many bytes this process may still allocate: the minimum of what the machine, its
    control groups (version 2) and its own limits (`ulimit -v`, `ulimit -d`) leave. Swap does not
    count, the page cache does.

    Args:
        root: root of the file system with the control groups.
    """
    import psutil  # not at the top: commands that do not need it start faster

    process = psutil.Process().memory_info()
    limits = ((resource.RLIMIT_AS, process.vms), (resource.RLIMIT_DATA, process.data))
    own = ((resource.getrlimit(limit)[0], used) for limit, used in limits)
    left = [most - used for most, used in own if most != resource.RLIM_INFINITY]
    left.append(psutil.virtual_memory().available)
    top = root / "sys/fs/cgroup"
    file = root / "proc/self/cgroup"
    lines = file.read_text().splitlines() if file.exists() else []
    name = next((line[3:] for line in lines if line.startswith("0::")), "/")
    group = top / name.lstrip("/")
    # In a container the name may be the host's, while its own group is at the top.
    for each in (group, *group.parents[: len(group.parents) - len(top.parents)]):
        try:
            most, used = (int((each / f"memory.{end}").read_text()) for end in ("max", "current"))
            cache = dict(line.split() for line in (each / "memory.stat").open())
        except (OSError, ValueError):  # no such group, or `max`: no limit
            continue
        left.append(most - used + int(cache["active_file"]) + int(cache["inactive_file"]))
    return max(0, min(left))
