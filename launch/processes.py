"""This process: environment variables for libraries, cores, signals; and commands in children.

SIGTERM, SIGUSR1 and SIGINT end a process at once while there is nothing to save: before the first
step, in a command that runs others (such as a study) while it runs none, and in a launcher before
it has workers. Later they are only noted, and read between steps: `train/guard/stopping.py`.
Commands in child processes free their memory when they end; signals are forwarded to them, and they
save.
"""

import contextlib
import ctypes
import os
import platform
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence, Set
from pathlib import Path
from types import FrameType

import polyad
from polyad.data.files import node_folder
from polyad.train.errors import SAID_ABOVE, STOP_SIGNALS, end_at_once


def prepare_environment() -> None:
    """Makes libraries quiet and tools available, in this process and those it starts."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    tools = str(Path(sys.executable).parent)
    if tools not in folders:
        # torch's builder searches ninja in PATH, and pip installs it beside the interpreter.
        os.environ["PATH"] = os.pathsep.join([tools, *folders])
    # Processes started as `python -m polyad.launch` use the same Polyad.
    root = str(Path(polyad.__file__).resolve().parent.parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, root])
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # for hosts without reverse DNS
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # no warning at a fork
    _keep_compiled_code()
    if not sys.warnoptions:
        # Warnings about libraries, kernels and devices that nothing here uses.
        for library in ("deepspeed", "megatron", "torch", "tensorboard"):
            warnings.filterwarnings("ignore", module=rf"{library}\b")


def _keep_compiled_code() -> None:
    """Makes torch.compile's cache persistent; torch's default is in /tmp.

    A home folder shared by several computers would be accessed by all of their processes at once,
    so each computer has its own subfolder. `TORCHINDUCTOR_CACHE_DIR` overrides the folder. If the
    folder cannot be created, or belongs to somebody else, torch's default is used.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    several = _number("WORLD_SIZE") > _number("LOCAL_WORLD_SIZE")
    with contextlib.suppress(OSError):
        folder = node_folder("compiled") if several else Path(caches) / "polyad" / "compiled"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it contains code to execute
        if os.access(folder, os.W_OK | os.X_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _number(name: str, otherwise: int = 1) -> int:
    """A variable from torchrun, or a default if missing or malformed (reported elsewhere)."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise


END_WITH_PARENT = "POLYAD_END_WITH_PARENT"
"""Environment variable with the number of the parent process with which this one must end. It may
be 1, in a container."""


def end_with_launcher() -> bool:
    """Makes a process end with its launcher, even if that is killed with SIGKILL.

    The launcher is torchrun, whose workers have their own sessions, or another `polyad` command.
    Without this, workers would keep training and writing beside those of the next start. Linux
    only.

    Returns:
        Whether a launcher started this process.
    """
    parent = os.environ.pop(END_WITH_PARENT, None)  # must not be inherited by its children
    launched = "TORCHELASTIC_RUN_ID" in os.environ or parent is not None
    if not launched or sys.platform != "linux":
        return launched
    parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)
    if parent is not None and os.getppid() != int(parent):  # it has already exited
        sys.exit(128 + signal.SIGTERM)
    return launched


def cores_here() -> int:
    """The number of cores that this process may use."""
    import psutil

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))  # a container may have fewer
    return cores


def threads_of_each(processes: int) -> int:
    """The number of threads per process if several share this machine's cores, unless set.

    Args:
        processes: number of processes that compute at once.
    """
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() else max(1, cores_here() // processes)


def share_cores(processes: int) -> None:
    """Divides this machine's cores among processes that compute at once, unless set otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_each(processes)))


def rank_of_process() -> int:
    """This process's rank from torchrun's environment; 0 without torchrun."""
    return _number("RANK", 0)


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
    """Binds each process of a node with GPUs to its own cores, unless already bound.

    torchrun starts processes on all cores, so that they and their loader workers migrate between
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
    """Returns the processors for one of several processes: whole adjacent cores.

    Args:
        process: number of the process, from 0.
        processes: number of processes on the node.
        cores: the processors of each core, ordered by socket.

    Returns:
        Processor numbers; empty if there are fewer cores than processes.
    """
    each = len(cores) // processes
    return {number for core in cores[process * each : (process + 1) * each] for number in core}


def _physical_cores(allowed: Set[int]) -> list[frozenset[int]]:
    """The allowed processors of each core."""
    cores = {frozenset({number} | _siblings(number)) & allowed for number in allowed}
    return sorted(cores, key=min)


def _siblings(number: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    cores: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


STOPPED = frozenset(128 + number for number in STOP_SIGNALS)
"""Exit statuses of a command that was stopped by a signal."""
CONTINUE = "run the same command again to continue"


def end_at_signals() -> None:
    """Installs handlers that end the process at once, with a line and the signal's status.

    Otherwise SIGTERM and SIGUSR1 would end it without a line, and SIGINT with a traceback.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    end_at_once(number, CONTINUE)


def ignore_further_signals() -> None:
    """Ignores further signals while the first one is handled."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _end:
            signal.signal(number, lambda number, frame: None)


def block_signals() -> None:
    """Holds signals back until the program that replaces this one can handle them; see
    `unblock_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def unblock_signals() -> None:
    """Delivers signals sent since this process was started by `polyad`, or since
    `block_signals`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def run_polyad(*arguments: str) -> int:
    """Runs a command and waits for it; it shares this process's output.

    The first termination signal to this process is forwarded to the command, which saves and ends.
    It may have received it already: Ctrl-C goes to all processes of a terminal, and so does Slurm's
    signal at the end of a job. Its signals are blocked until it can handle them
    (`unblock_signals`). Only the main thread can call this.

    Args:
        arguments: the command line without the program's name.

    Returns:
        Its exit status, as in a shell; one of `STOPPED` if a signal came meanwhile, to this process
        or only to the command.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            process.send_signal(number)

    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the child inherits it
    before = {each: signal.signal(each, forward) for each in STOP_SIGNALS}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "polyad.launch", *arguments],
            env=os.environ | {END_WITH_PARENT: str(os.getpid()), SAID_ABOVE: "1"},
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    if received:
        return 128 + received[0]
    return status if status >= 0 else 128 - status
