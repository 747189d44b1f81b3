"""Collectives: how long they wait."""

import pytest

from tests.helpers.training import Case, wait_in_vain
from tests.helpers.workers import WorkerPool

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_collective_of_the_engines_groups_waits_as_long_as_the_key_says() -> None:
    pool = WorkerPool(2)  # of its own: its groups are of no use afterwards
    try:
        waited, _ = pool.run(wait_in_vain, Case(stage=2, timeout_minutes=0.05))
    finally:
        pool.stop()
    assert 2 < waited < 10  # 3 seconds, not the 30 minutes that the world was made with
