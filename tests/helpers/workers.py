"""Worker processes over gloo, forked from one that has imported everything, and reused: importing
torch and DeepSpeed in every process would be most of the suite's time.
"""

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tests.helpers.forking import ForkServer, free_port


class WorkerError(AssertionError):
    """A worker raised, died, or did not answer in time."""


class WorkerPool:
    """`world_size` processes in one process group.

    A function that runs in them has to be importable: a module-level one of `tests.helpers`.

    Args:
        world_size: processes.
        server: forks them; None: they are started anew, see a GPU, and talk over NCCL.
    """

    def __init__(self, world_size: int, server: ForkServer | None) -> None:
        self.world_size, self._server = world_size, server
        self._stop: list[Callable[[], None]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="polyad-pool-")
        self._pipes: list[Connection] = []

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 600, **kwargs: Any
    ) -> list[Any]:
        """Calls a function in every worker at once; returns the results in rank order."""
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                arrived = pipe.poll(timeout if not errors else 5)
                ok, value = pipe.recv() if arrived else (False, f"no answer in {timeout} s")
            except (EOFError, OSError):
                ok, value = False, f"the process died: {self._last_words(rank)}"
            results.append(value)
            if not ok:
                errors.append(f"rank {rank}: {value}")
        if errors:
            self.stop()  # the others may hang in a collective; the next call starts anew
            raise WorkerError("\n".join(errors))
        return results

    def _start(self) -> None:
        port = free_port()
        address = str(Path(self._folder.name) / "pool")
        with Listener(address, "AF_UNIX") as listener:
            places = [(rank, self.world_size, port, address) for rank in range(self.world_size)]
            if self._server is None:
                self._stop = [_spawned(place) for place in places]
            else:
                self._stop = [self._server.call(serve, *place, False) for place in places]
            pipes = [listener.accept() for _ in places]
            self._pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in pipes)]

    def _last_words(self, rank: int) -> str:
        """A process's last output, and its stack when a signal came."""
        try:
            return _dying(str(Path(self._folder.name) / "pool"), rank).read_text() or "no trace"
        except OSError:
            return "no trace"

    def stop(self) -> None:
        """Ends the workers."""
        for stop in self._stop:
            stop()
        for pipe in self._pipes:
            pipe.close()
        self._stop, self._pipes = [], []


def _spawned(place: tuple[int, int, int, str]) -> Callable[[], None]:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(*place, True))
    process.start()

    def stop() -> None:
        process.kill()
        process.join()

    return stop


def _dying(address: str, rank: int) -> Path:
    return Path(f"{address}-{rank}.trace")


def serve(rank: int, world_size: int, port: int, address: str, gpu: bool) -> None:
    """Main loop of a worker: executes a pool's calls until the connection closes.

    Args:
        rank: of this process.
        world_size: processes of the pool.
        port: that they meet at.
        address: of the pool.
        gpu: whether the process sees a GPU.
    """
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    trace = _dying(address, rank).open("w")
    os.dup2(trace.fileno(), 2)  # a library in C++ says there why it aborts
    faulthandler.enable(trace)
    pipe = Client(address, "AF_UNIX")
    pipe.send(rank)
    import torch

    from polyad.parallel import comm

    torch.set_num_threads(1)
    comm.initialize()
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
