"""Real runs in processes that start in milliseconds, forked from one that has imported everything.

A run can be killed, paused or signalled like one started by a launcher, and leaves only files on
disk. Its processes are children of a server, which reaps them, not of the test.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass
class ForkedRun:
    """A run's processes, in the order of their ranks."""

    server: "ForkServer"
    pids: list[int]
    logs: list[Path]
    statuses: dict[int, int] = field(default_factory=dict)

    def signal(self, number: int, *ranks: int) -> None:
        """Sends a signal to some ranks, or to all."""
        for rank in ranks or range(len(self.pids)):
            if self.pids[rank] not in self.statuses:
                os.kill(self.pids[rank], number)

    def running(self) -> bool:
        """Whether any process still runs."""
        self.statuses |= self.server.ask("reap", self.pids)
        return len(self.statuses) < len(self.pids)

    def wait(self, timeout: float = 60.0) -> list[int]:
        """Returns exit statuses by rank, as in a shell; at the timeout kills the rest, and
        fails."""
        until = time.monotonic() + timeout
        while self.running():
            if time.monotonic() > until:
                self.kill()
                raise AssertionError(f"still running after {timeout} s: {self.text()}")
            time.sleep(0.005)
        return [self.statuses[pid] for pid in self.pids]

    def kill(self) -> None:
        """SIGKILL to all, and waits."""
        while self.running():
            self.signal(signal.SIGKILL)
            time.sleep(0.002)

    def until(self, condition: Callable[[], bool], timeout: float = 180.0) -> None:
        """Waits until a condition is true while the run continues."""
        end = time.monotonic() + timeout
        while not condition():
            if not self.running() or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"the run ended, or took too long: {self.text()}")
            time.sleep(0.002)

    def text(self) -> str:
        """The output of all ranks."""
        return "".join(log.read_text() for log in self.logs if log.exists())


class ForkServer:
    """Starts runs; one server serves many, one after the other or at once."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    @property
    def process_id(self) -> int:
        """The server's process id, the parent of all runs' processes, once it has started one."""
        return int(self._process.pid)

    def start(
        self,
        folder: Path,
        arguments: list[str],
        *,
        processes: int = 2,
        before: Callable[[int], None] | None = None,
        last: Sequence[str] = (),
        **environment: str,
    ) -> ForkedRun:
        """Starts `polyad ARGUMENTS` in several processes, as torchrun would.

        Args:
            folder: for what they print.
            arguments: the command line.
            processes: ranks.
            before: is called with the rank in each process; of a module of `tests.helpers`.
            last: words that the command line of the last rank has besides.
            environment: more variables.
        """
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("log-*")))
        logs = [folder / f"log-{number + rank:04d}" for rank in range(processes)]
        for log in logs:
            log.touch()
        names = [str(log) for log in logs]
        pids = self.ask("start", arguments, names, environment, before, list(last))
        return ForkedRun(self, pids, logs)

    def call(self, function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
        """Starts a process that calls a function.

        Args:
            function: of a module of `tests.helpers`.
            arguments: of the call.

        Returns:
            A function that kills the process and waits for its end.
        """
        pid = self.ask("call", function, arguments)

        def stop() -> None:
            while pid not in self.ask("reap", [pid]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.001)

        return stop

    def ask(self, *request: Any) -> Any:
        """A request to the server, and its answer."""
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,))
            self._process.start()
            theirs.close()
        self._pipe.send(request)
        return self._pipe.recv()

    def stop(self) -> None:
        """Ends the server."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    import torch

    torch.set_num_threads(1)
    import polyad.launch.cli
    import polyad.train.train
    from polyad.launch.processes import prepare_environment
    from polyad.parallel.zero import import_engine

    polyad.launch.cli.OTHERS_SPEAK_FIRST = 0.2  # no launcher ends a process while it waits
    prepare_environment()
    import_engine()
    gc.freeze()
    while True:
        try:
            what, *arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send({"start": _start, "call": _call, "reap": _reap}[what](*arguments))


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _call(function: Callable[..., None], arguments: tuple[Any, ...]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _live_no_longer_than_the_server()
            function(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    return pid


def _start(
    arguments: list[str],
    logs: list[str],
    environment: dict[str, str],
    before: Callable[[int], None] | None,
    last: list[str],
) -> list[int]:
    port, pids = free_port(), []
    for rank, log in enumerate(logs):
        pid = os.fork()
        if pid == 0:
            if len(logs) > 1:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(logs)),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                }  # fmt: skip
            os.environ |= environment
            words = arguments + (last if rank == len(logs) - 1 else [])
            _run(words, log, lambda rank=rank: before(rank) if before else None)
        pids.append(pid)
    return pids


def _run(arguments: list[str], log: str, before: Callable[[], None]) -> None:
    status = 70
    try:
        os.setsid()
        _live_no_longer_than_the_server()
        sink = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        from polyad.launch.cli import run

        before()
        status = run(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _live_no_longer_than_the_server() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _reap(pids: list[int]) -> dict[int, int]:
    ended = {}
    for pid in pids:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
        if done:
            code = os.waitstatus_to_exitcode(status)
            ended[pid] = code if code >= 0 else 128 - code
    return ended
