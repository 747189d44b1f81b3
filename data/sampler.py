"""Selects the samples that a process trains on, and those that it evaluates on.

Training depends only on the step, not on the number of processes, the total number of steps, or
the number of loader workers. Samples of all epochs are numbered consecutively without end. Global
batch s, that of step s, is samples s * B to (s + 1) * B - 1.
"""

import atexit
import functools
import math
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from polyad.data.errors import DataError


def micro_batches(
    samples: Dataset[Any],
    *,
    start_step: int,
    num_steps: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Any]:
    """Reads the micro-batches of one data-parallel rank.

    The global batch of step s is samples s * B to (s + 1) * B - 1, cut into B / m micro-batches;
    micro-batch j belongs to rank j % D. Whatever D is, the global batch is the same.

    Args:
        samples: The samples.
        start_step: First step, from 0; a resumed run passes the step where it stopped.
        num_steps: Steps to read.
        global_batch_size: B, samples of a step over all ranks, a multiple of m * D.
        micro_batch_size: m, samples of one forward pass of one rank.
        data_parallel_rank: This rank, from 0.
        data_parallel_size: D, the number of data-parallel ranks.
        num_workers: Loader processes; 0 reads in this one.
        pin_memory: Whether to copy batches to page-locked memory, for a GPU.

    Returns:
        Iterator over num_steps * B / (m * D) micro-batches: m samples stacked, for example token
        ids of shape (m, T + 1) from samples of shape (T + 1,).
    """
    stride = micro_batch_size * data_parallel_size
    batches = (
        list(range(first, first + micro_batch_size))
        for step in range(start_step, start_step + num_steps)
        for first in range(
            step * global_batch_size + micro_batch_size * data_parallel_rank,
            (step + 1) * global_batch_size,
            stride,
        )
    )
    return _read(samples, batches, num_workers, pin_memory=pin_memory)


def _read(
    samples: Dataset[Any],
    batches: Iterable[list[int]],
    num_workers: int,
    *,
    pin_memory: bool = False,
) -> Iterator[Any]:
    """Reads batches, given the numbers of the samples of each."""
    loader = DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=functools.partial(_begin, os.getpid()) if num_workers else None,
        # A forked process would inherit this one's sockets and keep them open, so that peers could
        # not detect this process's death.
        multiprocessing_context="spawn" if num_workers else None,
        # Without its own generator the loader would draw from torch's global one and change its
        # state.
        generator=torch.Generator().manual_seed(0),
    )
    if not num_workers:
        return iter(loader)
    # Workers take seconds to start, and inherit what is blocked. The tracker, which starts with the
    # first of them, would unblock two signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        loaded: Any = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for worker in loaded._workers:
        worker.terminate = worker.kill  # it ignores SIGTERM
    _WITH_WORKERS.add(loaded)
    return cast("Iterator[Any]", loaded)


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_WITH_WORKERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Iterators that have not been shut down yet."""


@atexit.register
def _end_workers() -> None:
    # multiprocessing would send them SIGTERM, which they ignore, and wait for them.
    for batches in list(_WITH_WORKERS):
        batches._shutdown_workers()


def _begin(parent: int, worker: int) -> None:
    # Torch looks from here on whether the parent has changed: one that had died before would go
    # unnoticed, and this process would never end.
    if os.getppid() != parent:
        os._exit(1)
    # A launcher signals every process of the job. The training process then saves a checkpoint and
    # still needs its workers; they exit when it does.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # After the finalizers that wait for all batches to be sent: Python would stop the threads that
    # send them inside torch's C++ code, which aborts the process.
    Finalize(None, os._exit, args=(0,), exitpriority=-100)


HeldOutBatch: TypeAlias = tuple[Any, Tensor, Tensor]
"""A batch of held-out samples of one process, on the model's device; which samples count [B], there
too (others pad the batch); and the numbers of those that count among all samples, on the CPU."""


def held_out_batches(
    samples: Dataset[Any],
    batch_size: int,
    rank: int,
    ranks: int,
    device: torch.device,
    report: Callable[[float], None] | None = None,
    num_workers: int = 0,
) -> Iterator[HeldOutBatch]:
    """Yields a process's batches of held-out samples; each sample counts once, over all processes.

    Args:
        samples: All held-out samples: NamedTuples of tensors.
        batch_size: B, samples per forward pass.
        rank: The process's number.
        ranks: Number of processes that share the samples.
        device: The model's.
        report: Called with the share done after every batch.
        num_workers: Loader processes; 0 reads in this one.

    Yields:
        ceil(total / (B * ranks)) batches, in order, equal in size on all ranks: the last ones are
        padded with the last sample.

    Raises:
        DataError: There is no sample.
    """
    total = len(samples)  # type: ignore[arg-type]
    if total < 1:
        raise DataError("no samples to evaluate on")
    size = min(batch_size, math.ceil(total / ranks))  # not larger than one batch needs
    rounds = math.ceil(total / (size * ranks))
    first_R1 = size * (ranks * torch.arange(rounds).unsqueeze(1) + rank)
    number_RB = first_R1 + torch.arange(size)
    batches = _read(samples, number_RB.clamp(max=total - 1).tolist(), num_workers)
    for done, (batch, number_B) in enumerate(zip(batches, number_RB, strict=True), start=1):
        own_B = number_B < total
        batch = type(batch)(*(part.to(device) for part in batch))
        yield batch, own_B.to(device), number_B[own_B]
        if report is not None:
            report(done / rounds)
