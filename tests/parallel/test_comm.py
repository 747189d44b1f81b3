"""Collectives: how long they wait."""

import pytest

from polyad.parallel import comm
from polyad.parallel.config import LayoutError
from tests.helpers.training import Case, wait_in_vain
from tests.helpers.workers import WorkerPool

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_collective_of_the_engines_groups_waits_as_long_as_the_key_says(forks):
    pool = WorkerPool(2, forks)  # of its own: its groups are of no use afterwards
    try:
        waited, _ = pool.run(wait_in_vain, Case(stage=2, timeout_minutes=0.05))
    finally:
        pool.stop()
    assert 2 < waited < 10  # 3 seconds, not the 30 minutes that the world was made with


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS: srun has started 2 tasks"),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE: mpirun has started 8 tasks"),
        ({"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}, "--nnodes 2"),
    ],
)
def test_worlds_that_do_not_know_of_one_another_are_refused(environment, words, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LayoutError, match=f"^.*{words}.*$"):
        comm.environment_world_size()


def test_a_world_size_without_a_rank_is_refused_where_training_would_begin(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE: 2 in the environment, but RANK is missing"):
        comm.initialize()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},  # a shell in an allocation
        {"SLURM_STEP_NUM_TASKS": "2", "GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "1"},
        {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7"},
    ],
)
def test_worlds_of_several_hosts_and_of_one_are_not(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert comm.environment_world_size() == 1
