"""Fixtures of the whole suite."""

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    """Gives a pool of n reused processes: `workers(2).run(function, ...)`."""
    pools: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        return pools.setdefault(world_size, WorkerPool(world_size))

    yield pool
    for each in pools.values():
        each.stop()
