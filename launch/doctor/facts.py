"""What a process sees of its host: versions, devices, data, and the folder that all share."""

import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyad.data.files import temporary_folder
from polyad.train.errors import one_line

if TYPE_CHECKING:
    from polyad.train.config.run import RunConfig

QUERY = "clocks_throttle_reasons.active,ecc.errors.uncorrected.volatile.total,temperature.gpu"
IDLE_CLOCKS = 0x1 | 0x2
"""Reasons of lower clocks that are no fault: nothing to do, and clocks that somebody has set."""


def facts_of(config: "RunConfig | None", local_rank: int) -> dict[str, Any]:
    """JSON values; equal ones on every host, but for names, numbers and what is free.

    Args:
        config: of the run; None: only the machine is looked at.
        local_rank: of this process on its host.
    """
    return {
        "host": socket.gethostname(),
        "node": int(os.environ.get("GROUP_RANK", "0")),
        "local_rank": local_rank,
        "local_processes": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        **_agreed(config),
        "device": _device(local_rank),
    }


def _agreed(config: "RunConfig | None") -> dict[str, Any]:
    """What has to be the same everywhere, and why data cannot be read, if it cannot."""
    from polyad.train.config.environment import agreed_facts
    from polyad.train.tasks.registry import open_task

    if config is None:
        return {"agreed": agreed_facts(None, None), "data_error": None}
    try:
        task = open_task(config.for_task())
        return {"agreed": agreed_facts(config, task), "data_error": None}
    except (ValueError, OSError) as error:
        return {"agreed": agreed_facts(config, None), "data_error": one_line(error)}


def _device(local_rank: int) -> dict[str, Any]:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    about: dict[str, Any] = {
        "cores": len(psutil.Process().cpu_affinity()),
        "load": os.getloadavg()[0],
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "gpus": torch.cuda.device_count(),
    }
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        free, total = torch.cuda.mem_get_info(local_rank)
        about |= {
            "gpu": torch.cuda.get_device_name(local_rank),
            "gpu_memory_bytes": total,
            "gpu_memory_free_bytes": free,
            **_nvidia_smi(local_rank),
            "xid": _xid() if local_rank == 0 else [],
        }
    return about


def _nvidia_smi(local_rank: int) -> dict[str, Any]:
    """What the driver's tool says of a GPU; nothing where it is not there or does not know."""
    import torch

    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        number = torch.cuda.get_device_properties(local_rank).uuid
        done = subprocess.run(
            [
                *("nvidia-smi", f"--id=GPU-{number}"),
                *(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"),
            ],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        reasons, errors, degrees = (each.strip() for each in done.stdout.split(","))
        return {
            "throttled": int(reasons, 16) & ~IDLE_CLOCKS if reasons.startswith("0x") else None,
            "ecc_errors": int(errors) if errors.isdecimal() else None,
            "degrees": int(degrees) if degrees.isdecimal() else None,
        }
    return {}


def _xid() -> list[str]:
    """The kernel's newest lines on faults of GPUs, where they can be read."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20, check=True)
        return [line for line in done.stdout.splitlines() if "NVRM: Xid" in line][-3:]
    return []


@contextmanager
def probe_folder(run: Path) -> Iterator[Path]:
    """A new folder beside the run's, on rank 0."""
    with temporary_folder(".polyad-doctor-", run.absolute().parent) as folder:
        yield folder


def shared_folder_facts(folder: Path, world: Any) -> dict[str, Any]:
    """What files of the run's file system do between hosts; all processes call it together.

    Args:
        folder: that rank 0 has made.
        world: this process.

    Returns:
        JSON values of this process.
    """
    from polyad.parallel import comm
    from polyad.train.guard.run_folder import seen_in_time

    lock = folder / "lock"
    found: dict[str, Any] = {}
    holder = None
    if world.is_main:
        (folder / "before").write_text("x")
        (folder / "before").rename(folder / "after")
        (folder / "seen").write_text("x")
        holder, found["lock"] = _try_lock(lock)
    comm.barrier()
    begun = time.monotonic()
    seen = seen_in_time(lambda: (folder / "seen").exists())
    found |= {"seen": seen, "seconds": time.monotonic() - begun if seen else None}
    if seen:
        found["renamed"] = seen_in_time(lambda: (folder / "after").exists())
        if not world.is_main and world.local_rank == 0:
            mine, found["lock"] = _try_lock(lock)
            _close(mine)
        found["clock"] = _clock(folder / f"clock-{world.rank}") if world.local_rank == 0 else None
    comm.barrier()
    _close(holder)
    return found


def _try_lock(path: Path) -> tuple[int | None, str]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor, "held"
    except OSError as error:
        return descriptor, errno.errorcode.get(error.errno or 0, "error")
    return descriptor, "taken"


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _clock(path: Path) -> float:
    """Seconds that the file system's clock is ahead of this host's."""
    path.write_text("x")
    return path.stat().st_mtime - time.time()
