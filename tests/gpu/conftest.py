"""A worker process on the GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.workers import WorkerPool


@pytest.fixture(scope="session")
def on_gpu() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that sees the GPU: a world of one over NCCL."""
    pytest.importorskip("deepspeed")
    pool = WorkerPool(1, None)
    yield lambda function, *args, **kwargs: pool.run(function, *args, **kwargs)[0]
    pool.stop()
