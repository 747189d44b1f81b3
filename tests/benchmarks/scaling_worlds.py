"""Several groups of processes on this machine, of which one computes at a time.

Each is a torchrun of its own. Its processes build their models once and then wait on a socket, so
that groups of different sizes can take turns as variants of a benchmark do.
"""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from polyad.launch.agent import STANDALONE
from polyad.train.config.run import RunConfig
from polyad.train.errors import RunError
from tests.benchmarks import environment
from tests.benchmarks.scaling_process import Measured

LOOK_EVERY = 0.5
"""Seconds between looks at processes that have not connected yet."""
TIME_TO_END = 20.0
"""Seconds that they have to end by themselves."""


class Worlds:
    """Groups of processes; they end with the `with` block.

    Args:
        configs: For each number of processes the configurations that they will run, by name.
        threads: Of a process, for each number of them.
    """

    def __init__(
        self, configs: Mapping[int, Mapping[str, RunConfig]], threads: Mapping[int, int]
    ) -> None:
        self._configs, self._threads = configs, threads
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._pipes: dict[tuple[int, int], Connection] = {}
        """By the number of processes and the rank."""
        self._folder = tempfile.TemporaryDirectory(prefix="polyad-")

    def __enter__(self) -> "Worlds":
        address = str(Path(self._folder.name) / "bench")
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                _bind(listener, address)
                listener.listen(sum(self._configs))
                listener.settimeout(LOOK_EVERY)
                for processes in self._configs:
                    self._launchers[processes] = self._start(processes, address)
                while len(self._pipes) < sum(self._configs):
                    self._accept(listener)
            for size, rank in self._pipes:
                self._receive(size, rank)  # its models stand
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(at_once=error is not None)

    def measure(self, processes: int, name: str, steps: int) -> list[Measured]:
        """Has a group do steps.

        Args:
            processes: Of the group.
            name: Of the configuration.
            steps: Of which the time is taken; in one more collectives are noted.

        Returns:
            What each process says, by rank.
        """
        for rank in range(processes):
            with contextlib.suppress(OSError):  # it has ended: seen when it is read from
                self._pipes[processes, rank].send((name, steps))
        return [self._receive(processes, rank) for rank in range(processes)]

    def _start(self, processes: int, address: str) -> subprocess.Popen[bytes]:
        files = {}
        for name, config in self._configs[processes].items():
            path = Path(self._folder.name) / f"{name}-{processes}.yaml"
            path.write_text(config.to_yaml(), encoding="utf-8")
            files[name] = str(path)
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "polyad.launch.torchrun", *STANDALONE),
                *("--nproc-per-node", str(processes), "-m", "tests.benchmarks.scaling_process"),
                json.dumps({"address": address, "configs": files}),
            ],
            env=environment() | {"OMP_NUM_THREADS": str(self._threads[processes])},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which ends them
        )

    def _accept(self, listener: socket.socket) -> None:
        try:
            pipe = Connection(listener.accept()[0].detach())
        except TimeoutError:
            for processes, launcher in self._launchers.items():
                if launcher.poll() is not None:
                    raise _failed(processes) from None
            return
        self._pipes[pipe.recv()] = pipe

    def _receive(self, processes: int, rank: int) -> Any:
        try:
            return self._pipes[processes, rank].recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launchers[processes].wait(TIME_TO_END)  # it says why
            raise _failed(processes) from None

    def _end(self, *, at_once: bool) -> None:
        for pipe in self._pipes.values():
            pipe.close()  # a process whose orders end ends
        for launcher in self._launchers.values():
            if at_once:
                launcher.terminate()
        for launcher in self._launchers.values():
            try:
                launcher.wait(TIME_TO_END)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
        self._folder.cleanup()


def _failed(processes: int) -> RunError:
    who = "the process" if processes == 1 else f"one of the {processes} processes"
    return RunError(f"scaling: {who} failed; it has said why")


def seconds_of(measured: Sequence[Measured], steps: int) -> float:
    """Seconds of a step: from the first process's beginning to the last one's end.

    Args:
        measured: Of each process.
        steps: That they did.
    """
    return (max(each.ended for each in measured) - min(each.began for each in measured)) / steps


def _bind(listener: socket.socket, address: str) -> None:
    try:
        listener.bind(address)
    except OSError as error:  # Linux allows 107 bytes
        raise RunError(f"TMPDIR: {address}: no socket can be made there: {error}") from None
