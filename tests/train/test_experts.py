"""Whole runs with experts: what is recorded, and what can be done with the result."""

import pytest

from polyad.parallel import comm
from polyad.parallel.weights import load_model
from polyad.train.bench import random_steps
from polyad.train.config.run import load_config
from polyad.train.loop.step import routing_record
from tests.helpers.runs import in_tensorboard, records, write_config

pytestmark = pytest.mark.distributed

SECTION = {
    "kind": "smoe", "num_experts": 4, "expert_hidden_size": 32, "graph": "similarity",
    "similarity": "cosine", "placement": [1],
}  # fmt: skip
EXPERTS = {"model__feed_forward": SECTION, "loss": {"load_balance": 0.01, "router_z": 0.001}}
LAYER = "routing/blocks.1.feed_forward"


@pytest.fixture(scope="module")
def finished(run_of):
    """A finished run of 6 steps by 2 processes, each with half of the experts."""
    return run_of(2, **EXPERTS, parallel__expert_parallel_size=2)


def test_every_step_records_its_routing(finished):
    lines = records(finished)
    for line in lines:
        load = line[f"{LAYER}/load"]
        assert sum(load) == pytest.approx(1, abs=1e-5)
        assert line[f"{LAYER}/load_max"] == pytest.approx(4 * max(load), rel=1e-5)
        assert line[f"{LAYER}/unused"] == load.count(0.0) / 4
        assert line[f"{LAYER}/dropped"] == 0
        assert 1 <= line[f"{LAYER}/effective_neighbours"] <= 32
        # The entropy of a mean is at least the mean of the entropies.
        assert 0 < line[f"{LAYER}/entropy"] <= line[f"{LAYER}/usage_entropy"] < 1.387  # ln 4
        assert 1 <= line["routing/load_max"] <= 4
        # Rank 0 has the first two experts.
        shares = [sum(load[:2]), sum(load[2:])]
        assert line[f"{LAYER}/rank_load"] == pytest.approx(shares, abs=1e-5)
        assert line["routing/rank_load_max"] == pytest.approx(2 * max(shares), rel=1e-4)
        assert not any(key.startswith("routing/blocks.0") for key in line)  # dense
    assert load_model(finished).blocks[1].feed_forward.experts.up.shape == (4, 32, 32)
    scalars = in_tensorboard(finished)
    names = ("routing/load_max", f"{LAYER}/entropy", f"{LAYER}/balance_loss")
    for name in (*names, "routing/rank_load_max"):
        expected = {line["step"]: line[name] for line in lines}
        assert scalars[name] == pytest.approx(expected, rel=1e-6)


def test_between_lines_of_the_console_a_run_trains_alike_and_records_less(run_of, finished):
    folder = run_of(2, **EXPERTS, parallel__expert_parallel_size=2, log={"every": 4})
    always = "load_max", "unused", "rank_load_max", "balance_loss", "z_loss"
    at_times = "entropy", "usage_entropy", "effective_neighbours", "importance_loss", "dropped"
    for ours, theirs in zip(records(folder), records(finished), strict=True):
        names = ["loss", "grad_norm", *(f"{LAYER}/{name}" for name in always)]
        if ours["step"] in (3, 4, 6):  # a validation, a line, the end
            names += [f"{LAYER}/{name}" for name in at_times]
        else:
            assert not any(f"{LAYER}/{name}" in ours for name in at_times)
        assert [ours[name] for name in names] == [theirs[name] for name in names]


def test_the_balance_loss_is_added_and_not_reported(run_of, finished):
    without = run_of(2, **EXPERTS | {"loss": {"load_balance": 0.0, "router_z": 0.0}})
    ours, theirs = records(without), records(finished)
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-5)
    assert ours[0]["grad_norm"] != pytest.approx(theirs[0]["grad_norm"], rel=1e-4)


def highest_loads(config, balanced):
    """The load of the busiest expert over the mean, in each of three steps on random samples."""
    steps = random_steps(load_config(config), comm.initialize(), 3, balanced=balanced)
    numbers = [step.statistics.numbers for step in steps]
    return [routing_record(each.routing)["routing/load_max"] for each in numbers]


def test_forced_loads_are_equal_in_every_step(workers, tmp_path):
    changes = EXPERTS | {"model__vocab_size": 61, "model__sequence_length": 16}
    config = write_config(tmp_path / "config.yaml", tmp_path, **changes)
    assert workers(1).run(highest_loads, config, True) == [[1.0, 1.0, 1.0]]
    assert min(workers(1).run(highest_loads, config, False)[0]) > 1
