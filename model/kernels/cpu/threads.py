"""Runs many small tasks on a CPU, each in one thread rather than in all threads.

A product of few rows is hardly faster with two threads than with one, and some operations always
use one thread. Run in parallel, several of them use all cores.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

Item = TypeVar("Item")


def parallel_for(work: Callable[[Iterator[Item]], None], items: Sequence[Item]) -> None:
    """Runs work in as many threads as PyTorch uses, each of which computes single-threaded.

    Gradients are not recorded.

    Args:
        work: Consumes an iterator over items; every thread calls it once. Items must not write to
            the same memory.
        items: A free thread takes the next item, so put the longest first.

    Raises:
        Exception: The first exception of `work`, after all threads have ended.
    """
    queue: SimpleQueue[Item] = SimpleQueue()
    for item in items:
        queue.put(item)

    @torch.inference_mode()
    def run() -> None:
        work(_until_empty(queue))

    threads = torch.get_num_threads()
    futures = [_pool(threads).submit(run) for _ in range(threads)]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


def _until_empty(queue: SimpleQueue[Item]) -> Iterator[Item]:
    while True:
        try:
            item = queue.get_nowait()
        except Empty:
            return
        yield item


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """A pool of threads that is kept: starting one takes as long as a small product."""
    before = torch.get_num_threads()
    started = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # the first call in a thread resets the number
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, "polyad-experts", begin)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(before)  # new threads start with the last number set
    return pool


# A forked process has none of the threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
