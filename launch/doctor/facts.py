"""Facts about a process's host: versions, devices, data, and the shared folder."""

import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from polyad.data.files import temporary_folder
from polyad.train.errors import one_line

if TYPE_CHECKING:
    from polyad.parallel.comm import World
    from polyad.train.config.run import RunConfig


class Device(TypedDict):
    """The processor of a host, and the GPU of a process; missing facts have no key."""

    cores: int
    load: float
    memory_bytes: int
    memory_free_bytes: int
    gpus: int
    gpu: NotRequired[str]
    gpu_memory_bytes: NotRequired[int]
    gpu_memory_free_bytes: NotRequired[int]
    throttled: NotRequired[int | None]
    """Bit mask of reasons for lowered clocks; None: unknown to the driver."""
    ecc_errors: NotRequired[int | None]
    degrees: NotRequired[int | None]
    xid: NotRequired[list[str]]


class SharedFolder(TypedDict, total=False):
    """Behavior of the run's file system between hosts."""

    error: str
    """Why rank 0 cannot write there; nothing else is tested then."""
    seen: bool
    """Whether this process can read what rank 0 has written."""
    seconds: float | None
    """Seconds until it could."""
    renamed: bool
    lock: str
    """Result of taking a lock that rank 0 holds: `held`, `taken`, or the name of an error."""
    clock: float | None
    """Seconds by which the file system's clock is ahead of this host's."""


class Facts(TypedDict):
    """Facts about one process; should be equal on all hosts, except names, numbers and free
    space."""

    host: str
    node: int
    local_rank: int
    local_processes: int
    agreed: dict[str, str]
    """Facts that must be the same everywhere."""
    data_error: str | None
    """Why data cannot be read."""
    device: Device
    folder: NotRequired[SharedFolder]
    """The run's folder, if given."""


QUERY = "clocks_throttle_reasons.active,ecc.errors.uncorrected.volatile.total,temperature.gpu"
IDLE_CLOCKS = 0x1 | 0x2
"""Harmless reasons for lower clocks: an idle GPU, and clocks set by the user."""


def facts_of(config: "RunConfig | None", world: "World") -> Facts:
    """Collects facts about this process; all processes call this together.

    Args:
        config: the run's configuration; None: only the machine is examined.
        world: this process.
    """
    agreed, data_error = _agreed(config)
    found: Facts = {
        "host": socket.gethostname(),
        "node": int(os.environ.get("GROUP_RANK", "0")),
        "local_rank": world.local_rank,
        "local_processes": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "agreed": agreed,
        "data_error": data_error,
        "device": _device(world.local_rank),
    }
    if config is not None:
        found["folder"] = _folder(config, world)
    return found


def named_apart(facts: Sequence[Facts]) -> list[Facts]:
    """Adds node numbers to the names of hosts with equal names."""
    nodes: dict[str, set[int]] = {}
    for each in facts:
        nodes.setdefault(each["host"], set()).add(each["node"])
    return [
        {**each, "host": f"{each['host']} (node {each['node']})"}
        if len(nodes[each["host"]]) > 1
        else each
        for each in facts
    ]


def _agreed(config: "RunConfig | None") -> tuple[dict[str, str], str | None]:
    """Facts that must be the same everywhere, and why data cannot be read, if so."""
    from polyad.train.config.environment import agreed_facts
    from polyad.train.tasks.registry import open_task

    if config is None:
        return agreed_facts(None, None), None
    try:
        return agreed_facts(config, open_task(config.for_task())), None
    except (ValueError, OSError) as error:
        return agreed_facts(config, None), one_line(error)


def _device(local_rank: int) -> Device:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    about: Device = {
        "cores": len(psutil.Process().cpu_affinity()),
        "load": os.getloadavg()[0],
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "gpus": torch.cuda.device_count(),
    }
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        about["gpu"] = torch.cuda.get_device_name(local_rank)
        free, about["gpu_memory_bytes"] = torch.cuda.mem_get_info(local_rank)
        about["gpu_memory_free_bytes"] = free
        _ask_driver(about, local_rank)
        about["xid"] = _xid() if local_rank == 0 else []
    return about


def _ask_driver(about: Device, local_rank: int) -> None:
    """Adds facts about a GPU from the driver's tool, if available."""
    import torch

    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        number = torch.cuda.get_device_properties(local_rank).uuid
        words = ["nvidia-smi", f"--id=GPU-{number}", f"--query-gpu={QUERY}"]
        done = subprocess.run(
            [*words, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        reasons, errors, degrees = (each.strip() for each in done.stdout.split(","))
        about["throttled"] = int(reasons, 16) & ~IDLE_CLOCKS if reasons.startswith("0x") else None
        about["ecc_errors"] = int(errors) if errors.isdecimal() else None
        about["degrees"] = int(degrees) if degrees.isdecimal() else None


def _xid() -> list[str]:
    """The kernel's newest log lines on GPU faults, if readable."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20, check=True)
        return [line for line in done.stdout.splitlines() if "NVRM: Xid" in line][-3:]
    return []


def _folder(config: "RunConfig", world: "World") -> SharedFolder:
    from polyad.parallel import comm

    with contextlib.ExitStack() as stack:
        place, reason = "", ""
        if world.is_main:
            parent = Path(config.run.folder).absolute().parent
            try:
                made = stack.enter_context(temporary_folder(".polyad-doctor-", parent))
                place = str(made)
            except OSError as error:
                reason = f"{error.filename or config.run.folder}: {error.strerror}"
        place, reason = comm.from_main((place, reason))
        if reason:
            return {"error": f"run.folder: {config.run.folder}: cannot be written to: {reason}"}
        return _shared_folder(Path(place), world)


def _shared_folder(folder: Path, world: "World") -> SharedFolder:
    """Tests files in a folder created by rank 0 between hosts; all processes call this."""
    from polyad.parallel import comm
    from polyad.train.guard.run_folder import seen_in_time

    lock = folder / "lock"
    found: SharedFolder = {}
    holder = None
    if world.is_main:
        (folder / "before").write_text("x")
        (folder / "before").rename(folder / "after")
        (folder / "seen").write_text("x")
        holder, found["lock"] = _try_lock(lock)
    comm.barrier()
    begun = time.monotonic()
    found["seen"] = seen_in_time(lambda: (folder / "seen").exists())
    found["seconds"] = time.monotonic() - begun if found["seen"] else None
    if found["seen"]:
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
    """Seconds by which the file system's clock is ahead of this host's."""
    path.write_text("x")
    return path.stat().st_mtime - time.time()
