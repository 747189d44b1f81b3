"""Worker processes over gloo, started once and reused: importing torch and DeepSpeed in every case
would be most of the suite's time.
"""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class WorkerError(AssertionError):
    """A worker raised, died, or did not answer in time."""


class WorkerPool:
    """`world_size` processes in one process group.

    A function that runs in them has to be importable: a module-level one of `tests.helpers`.
    They see a GPU, and talk over NCCL, only with `gpu`.
    """

    def __init__(self, world_size: int, *, gpu: bool = False) -> None:
        self.world_size, self._gpu = world_size, gpu
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 240, **kwargs: Any
    ) -> list[Any]:
        """Calls a function in every worker at once; returns the results in rank order."""
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, args, kwargs))
        results, errors = [], []
        for rank, (_, pipe) in enumerate(self._workers):
            try:
                arrived = pipe.poll(timeout if not errors else 5)
                ok, value = pipe.recv() if arrived else (False, f"no answer in {timeout} s")
            except (EOFError, OSError):
                ok, value = False, "the process died"
            results.append(value)
            if not ok:
                errors.append(f"rank {rank}: {value}")
        if errors:
            self.stop()  # the others may hang in a collective; the next call starts anew
            raise WorkerError("\n".join(errors))
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, port, theirs, self._gpu)
            process = context.Process(target=_serve, args=arguments)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def stop(self) -> None:
        """Ends the workers."""
        for process, _ in self._workers:
            process.kill()
        for process, pipe in self._workers:
            process.join()
            pipe.close()
        self._workers = []


def _serve(rank: int, world_size: int, port: int, pipe: Connection, gpu: bool) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from parallel import comm

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
