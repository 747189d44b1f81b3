"""torchrun without its report of 40 lines when a worker fails: `python -m polyad.launch.torchrun`.

It takes torchrun's options. The worker has already reported the error, which torchrun's report
would hide. The status is that of the worker that failed first, so that bad input is distinguished
from a failed run. Hosts that cannot connect are also reported in one line.

On a single host nothing listens on the network (torchrun's own stores would, on all interfaces):
agent and workers connect through files in a folder that other users cannot read
(`parallel/comm.py`).
"""

import contextlib
import logging
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from polyad.data.files import temporary_folder
from polyad.launch.processes import (
    CONTINUE,
    END_WITH_PARENT,
    block_signals,
    end_at_signals,
    end_with_launcher,
    share_cores,
    unblock_signals,
)
from polyad.train.errors import SAID_ABOVE, STOP_FILE, end_at_once, one_line, stop_line, stop_signal

if TYPE_CHECKING:
    from polyad.parallel.agents import Workers

STANDALONE = "--standalone"


def torchrun(
    command: Sequence[str], processes: int, max_restarts: int = 0, *, nodes: int = 1
) -> list[str]:
    """Returns the command line for a host's part of a run; the first word is this Python.

    Args:
        command: a `polyad` command with its arguments.
        processes: number of processes of each host.
        max_restarts: maximum number of restarts after failures.
        nodes: number of hosts; of several, options for their rendezvous have to be added.
    """
    return [
        *(sys.executable, "-m", "polyad.launch.torchrun"),
        *("--nnodes", str(nodes), "--nproc-per-node", str(processes)),
        *("--max-restarts", str(max_restarts)),
        *("-m", "polyad.launch", *command),
    ]


def become(words: list[str], variables: Mapping[str, str]) -> NoReturn:
    """Replaces this process by a command, which then receives the terminal's signals directly and
    determines the exit status.
    """
    os.environ.update(variables)
    sys.stdout.flush()
    sys.stderr.flush()
    block_signals()
    os.execv(sys.executable, words)


def become_processes(processes: int) -> NoReturn:
    """Replaces this process by torchrun, which runs the same command in P local processes."""
    share_cores(processes)
    become(torchrun(sys.argv[1:], processes), {})


def main() -> int:
    """Runs torchrun on `sys.argv`.

    Returns:
        The exit status: 0; that of the first failed worker; or 128 + the signal that ended it or
        us.
    """
    if END_WITH_PARENT in os.environ:
        end_with_launcher()
    logging.disable(logging.ERROR)  # only in this process; workers have their own
    # Otherwise one store serves all restarts, and restarted processes find the addresses of ended
    # ones and cannot connect (pytorch issue 135712; seen with torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # Slurm's signal before the time limit is for the workers, like SIGTERM. torchrun also takes
    # options from the environment; older versions ignore this one, and are killed by the signal.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder("polyad-launch-"))
            folder.chmod(0o700)
        except OSError as error:
            line = f"TMPDIR: no folder for temporary files can be made: {error.strerror}"
            print(f"polyad: error: {line}", file=sys.stderr, flush=True)
            return 1
        return _start(folder)


def _start(folder: Path) -> int:
    """Runs torchrun with a temporary folder of this host."""
    os.environ[STOP_FILE] = str(folder / "stop")
    os.environ[END_WITH_PARENT] = str(os.getpid())  # for the workers
    words = sys.argv.index("-m") if "-m" in sys.argv else len(sys.argv)
    if "--log-dir" not in sys.argv[:words]:  # torchrun's own would stay
        sys.argv[words:words] = ["--log-dir", str(folder / "logs")]
        words += 2
    from polyad.parallel.agents import watch_workers

    workers = watch_workers(
        end=lambda number: end_at_once(number, CONTINUE),
        is_stop=lambda status: stop_signal(status) is not None,
    )
    if _is_one_host(sys.argv[:words]):
        _meet_in(folder, words)
    else:
        from polyad.parallel import comm

        os.environ.pop(comm.STORE, None)  # from a single-host run that started this one
    return _run(workers) or _stopped()


def _is_one_host(options: Sequence[str]) -> bool:
    after_nodes = [b for a, b in pairwise(options) if a == "--nnodes"]
    return STANDALONE in options or after_nodes in (["1"], ["1:1"])


def _meet_in(folder: Path, words: int) -> None:
    """Makes the agent and its workers connect through files in a private folder.

    Args:
        folder: the folder.
        words: how many of `sys.argv` are torchrun's; the last value of an option counts.
    """
    from polyad.parallel import comm

    here = [
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-id", folder.name),
        *("--rdzv-endpoint", str(folder / "agents"), "--local-addr", "127.0.0.1"),
    ]
    sys.argv[1:words] = [word for word in sys.argv[1:words] if word != STANDALONE] + here
    os.environ[comm.STORE] = str(folder / "workers")


def _run(workers: "Workers") -> int:
    try:
        # By name, as a command: this package imports no communication library.
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except Exception as error:
        if hasattr(error, "get_first_failure"):  # ChildFailedError
            return _worker_status(*error.get_first_failure())
        if hasattr(error, "sigval"):  # SignalException
            return _stopped() or _say_stop(int(error.sigval), "")
        if any(kind.__name__ == "RendezvousError" for kind in type(error).__mro__):
            return _rendezvous_status(error, workers)
        raise
    return 0


def _stopped() -> int:
    """128 + the signal that stopped the workers; 0 if they finished."""
    with contextlib.suppress(OSError, ValueError):
        return 128 + int(Path(os.environ[STOP_FILE]).read_text(encoding="utf-8"))
    return 0


def _say_stop(number: int, who: str) -> int:
    """Prints the line of a stop, which no worker has printed, and returns the status."""
    if SAID_ABOVE not in os.environ:
        print(f"polyad: {who}{stop_line(number, CONTINUE)}", file=sys.stderr, flush=True)
    return 128 + number


def _worker_status(rank: int, failure: Any) -> int:
    status: int = failure.exitcode
    if (number := stop_signal(status)) is not None:
        return _stopped() or _say_stop(number, f"rank {rank}: ")
    if status >= 0:
        return status
    name = signal.Signals(-status).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    print(f"polyad: error: rank {rank} was ended by {name}{hint}", file=sys.stderr, flush=True)
    return 128 - status


def _rendezvous_status(error: Exception, workers: "Workers") -> int:
    if workers.bad_input:  # a worker has reported the error; other hosts' agents have ended
        return 2
    options = dict(pairwise(sys.argv))
    where = options.get("--rdzv-endpoint", "--rdzv-endpoint")
    if type(error).__name__ == "RendezvousConnectionError" and workers.started:
        line = f"the agent at {where}, where the hosts meet, has ended: its output says why"
    elif type(error).__name__ == "RendezvousTimeoutError":
        line = (
            f"the hosts did not meet: fewer than {options.get('--nnodes', 'all')} came to {where} "
            f"in time; the output of the others says why, or --rdzv-endpoint, --rdzv-id and "
            f"--nnodes are not the same on all"
        )
    else:
        reason = one_line(error) or "the other hosts have given up"
        line = (
            f"the hosts did not meet: {type(error).__name__}: {reason}; --rdzv-endpoint, --rdzv-id "
            f"and --nnodes have to be the same on all of them"
        )
    print(f"polyad: error: {line}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    end_at_signals()
    unblock_signals()
    sys.exit(main())
