"""Loads of experts that are forced."""

from pathlib import Path

import pytest

from polyad.parallel import comm
from polyad.train.bench import random_steps
from polyad.train.config.run import load_config
from polyad.train.loop.statistics import routing_record
from tests.helpers.runs import write_config


def highest_loads(config: Path, balanced: bool) -> list[float]:
    """The load of the busiest expert over the mean, in each of three steps on random samples."""
    steps = random_steps(load_config(config), comm.initialize(), 3, balanced=balanced)
    return [routing_record(step.outcome().routing)["routing/load_max"] for step in steps]


@pytest.mark.distributed
def test_forced_loads_are_equal_in_every_step(workers, tmp_path):
    sparse = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 16}
    changes = {"model__feed_forward": sparse, "model__vocab_size": 61, "model__sequence_length": 16}
    config = write_config(tmp_path / "config.yaml", tmp_path, **changes)
    assert workers(1).run(highest_loads, config, True) == [[1.0, 1.0, 1.0]]
    assert min(workers(1).run(highest_loads, config, False)[0]) > 1
