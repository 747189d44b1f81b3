"""Environment variables for libraries, set before these are imported."""

import contextlib
import ctypes
import os
import platform
import signal
import sys
import warnings
from collections.abc import Sequence, Set
from pathlib import Path

import polyad
from polyad.data.files import node_folder


def prepare_environment() -> None:
    """Makes this process, and those it starts, quiet and able to find their tools."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    tools = str(Path(sys.executable).parent)
    if tools not in folders:
        # torch's builder looks for ninja there, which pip puts beside the interpreter.
        os.environ["PATH"] = os.pathsep.join([tools, *folders])
    # Processes that are started as `python -m polyad.launch` find the same Polyad.
    root = str(Path(polyad.__file__).resolve().parent.parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, root])
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else of hosts without a reverse name
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _keep_compiled_code()
    if not sys.warnoptions:
        # Warnings about libraries, kernels and devices that nothing here uses.
        for library in ("deepspeed", "megatron", "torch", "tensorboard"):
            warnings.filterwarnings("ignore", module=rf"{library}\b")


def _keep_compiled_code() -> None:
    """Makes torch.compile cache its code where the next start finds it; torch's default is in /tmp.

    A home folder that several computers share would be read and written by all of their processes
    at once, so there each keeps its own. `TORCHINDUCTOR_CACHE_DIR` names another one. What cannot
    be made, or belongs to somebody else, is left to torch.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    several = _number("WORLD_SIZE") > _number("LOCAL_WORLD_SIZE")
    with contextlib.suppress(OSError):
        folder = node_folder("compiled") if several else Path(caches) / "polyad" / "compiled"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it holds code that is run
        if os.access(folder, os.W_OK | os.X_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _number(name: str, otherwise: int = 1) -> int:
    """A variable of torchrun's, or what stands for one that is missing or wrong: others say so."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise


END_WITH_PARENT = "POLYAD_END_WITH_PARENT"
"""The environment variable that says which process this one is to end with: its parent. Its number
may be 1, in a container."""


def end_with_launcher() -> bool:
    """Makes a process end when its launcher does, even if that was killed with SIGKILL.

    That is torchrun, whose workers have sessions of their own, or another command of `polyad`. A
    SIGKILL of it would leave them training, and writing, beside those of the next start. Linux
    only.

    Returns:
        Whether one of them started this process.
    """
    parent = os.environ.pop(END_WITH_PARENT, None)  # must not be inherited by its children
    launched = "TORCHELASTIC_RUN_ID" in os.environ or parent is not None
    if not launched or sys.platform != "linux":
        return launched
    parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)
    if parent is not None and os.getppid() != int(parent):  # it ended before
        sys.exit(128 + signal.SIGTERM)
    return launched


def cores_here() -> int:
    """The cores of this machine that this process may use."""
    import psutil

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))  # a container may have fewer
    return cores


def threads_of_each(processes: int) -> int:
    """Threads of each of several processes that share this machine's cores, unless told otherwise.

    Args:
        processes: that compute at once.
    """
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdecimal() else max(1, cores_here() // processes)


def share_cores(processes: int) -> None:
    """Divides this machine's cores among processes that compute at once, unless told otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_each(processes)))


def rank_of_process() -> int:
    """This process's rank among those of torchrun, from the environment; 0 without it."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def is_main() -> bool:
    """Whether this is the process that prints for all."""
    return rank_of_process() == 0


def processor_name() -> str:
    """The name of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
            return next(names).strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def bind_to_cores() -> None:
    """Gives each process of a node with GPUs cores of its own, unless it was given some.

    torchrun starts them on all cores, where a process and its loader workers wander between
    sockets. Linux only.
    """
    processes = _number("LOCAL_WORLD_SIZE")
    if processes < 2 or sys.platform != "linux" or not GPUS.exists():
        return
    allowed = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # the launcher may be in another container
        if allowed == os.sched_getaffinity(os.getppid()):
            mine = cores_of(_number("LOCAL_RANK", 0), processes, _physical_cores(allowed))
            os.sched_setaffinity(0, mine or allowed)


GPUS = Path("/dev/nvidiactl")
"""Exists only where a GPU driver is installed."""


def cores_of(process: int, processes: int, cores: Sequence[frozenset[int]]) -> set[int]:
    """The processors of one of several processes: whole cores, side by side.

    Args:
        process: from 0.
        processes: of the node.
        cores: the processors of each core, in their order, which is that of sockets.

    Returns:
        Nothing, if there are fewer cores than processes.
    """
    each = len(cores) // processes
    return {number for core in cores[process * each : (process + 1) * each] for number in core}


def _physical_cores(allowed: Set[int]) -> list[frozenset[int]]:
    """The processors of each core that are allowed."""
    cores = {frozenset({number} | _siblings(number)) & allowed for number in allowed}
    return sorted(cores, key=min)


def _siblings(number: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
