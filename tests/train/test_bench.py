"""The interval of a median: its ranks by the sign test, and how often it holds the median; loads of
experts that are forced."""

import random
import statistics
from pathlib import Path

import pytest

from polyad.parallel import comm
from polyad.train.bench import CONFIDENCE, RandomTraining, interval
from polyad.train.config.run import load_config
from polyad.train.loop.statistics import routing_record
from tests.helpers.runs import write_config


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, None), (4, None), (5, (0, 4)), (7, (0, 6)), (8, (1, 6)), (9, (1, 7)), (20, (5, 14))],
)
def test_the_interval_has_the_ranks_of_the_sign_test(count, expected):
    values = [float(value) for value in range(count)]
    random.Random(0).shuffle(values)
    assert interval(values) == expected


@pytest.mark.parametrize("count", [5, 9, 15])
def test_the_interval_holds_the_median_as_often_as_it_says(count):
    draw = random.Random(count)
    held = []
    for _ in range(4000):
        low, high = interval([draw.lognormvariate(0, 1) for _ in range(count)])
        held.append(low <= 1 <= high)  # the distribution's median
    assert CONFIDENCE - 0.01 < statistics.fmean(held) < 0.99


def highest_loads(config: Path, balanced: bool) -> list[float]:
    """The load of the busiest expert over the mean, in each of three steps on random samples."""
    training = RandomTraining(load_config(config), comm.initialize(), balanced=balanced)
    loads = []
    for step in training.steps(3):
        loads.append(routing_record(step.outcome().routing)["routing/load_max"])
    return loads


@pytest.mark.distributed
def test_forced_loads_are_equal_in_every_step(workers, tmp_path):
    sparse = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 16}
    changes = {"model__feed_forward": sparse, "model__vocab_size": 61, "model__sequence_length": 16}
    config = write_config(tmp_path / "config.yaml", tmp_path, **changes)
    assert workers(1).run(highest_loads, config, True) == [[1.0, 1.0, 1.0]]
    assert min(workers(1).run(highest_loads, config, False)[0]) > 1
