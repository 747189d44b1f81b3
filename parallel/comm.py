"""The process group: its start, its end, and the few exchanges that the training loop needs."""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints and writes what all share."""
        return self.rank == 0


def environment_world_size() -> int:
    """Processes that torchrun started, 1 without it; reads the environment only."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def environment_rank() -> int:
    """This process's rank under torchrun, 0 without it; reads the environment only."""
    return int(os.environ.get("RANK", "0"))


def initialize(timeout_minutes: float = 30.0) -> World:
    """Joins the processes that torchrun started, or makes a world of one; a second call is free.

    Collectives run over NCCL where there is a GPU for every local process, else over gloo.
    """
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not dist.is_initialized():
        timeout = timedelta(minutes=timeout_minutes)
        backend = "nccl" if on_gpu else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device)


def shutdown() -> None:
    """Leaves the process group once every process has come this far."""
    if dist.is_initialized():
        dist.barrier()  # a peer that still talks to this process would abort
        dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """Ends a worker at once, after flushing what it printed.

    The interpreter's own shutdown can end in SIGABRT when a gloo thread frees its last tensor.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def seed_random(seed: int, step: int, world: World) -> None:
    """Starts the random numbers of dropout: of its own on every rank."""
    digest = hashlib.sha256(f"{seed}/{step}/{world.rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:4], "big"))


def rank() -> int:
    """This process's rank in the world."""
    return dist.get_rank()


def barrier() -> None:
    """Waits for all processes."""
    dist.barrier()


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor over all processes; any shape, the same on each."""
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes; any shape, the same on each."""
    total = values.clone()
    dist.all_reduce(total)
    return total


def max_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The elementwise maximum of a tensor over all processes."""
    total = values.clone()
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return total


def any_rank(condition: bool) -> bool:
    """Whether the condition holds anywhere: every process gets the same answer."""
    return bool(max_over_ranks(torch.tensor(float(condition), device=_device())).item())


def from_main(value: T | None) -> T:
    """What rank 0 holds, on every process. Small Python values only, made by this program."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=_device())
    return box[0]  # type: ignore[return-value]


def gather_to_main(value: T) -> list[T] | None:
    """Every rank's value in rank order, on rank 0; None elsewhere."""
    everyone: list[T | None] | None = (
        [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    )
    dist.gather_object(value, everyone, dst=0)
    return everyone  # type: ignore[return-value]


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps off standard output what libraries (and compilers they start) print there.

    Works on the file descriptor, since some of it does not come from Python; standard error
    stays.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)


def replica(zero_stage: int) -> tuple[int, int]:
    """Which copy of its state a process holds, and how many copies there are.

    ZeRO leaves one copy of the optimizer's state; without it every data-parallel process has one.
    """
    return (dist.get_rank(), dist.get_world_size()) if zero_stage == 0 else (0, 1)


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
