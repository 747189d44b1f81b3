"""Statistics of a step: means over its micro-batches, and what is said of them."""

import math

import pytest
import torch

from polyad.model.mumoe.gating import GateOutput
from polyad.model.mumoe.layer import gate_statistics
from polyad.model.output import RoutingStats
from polyad.parallel import comm
from polyad.train.loop.step import StepStatistics, measures, routing_record

pytestmark = pytest.mark.distributed


def statistics(rows):
    gated = GateOutput([torch.tensor(rows, dtype=torch.float32)])
    return gate_statistics(gated)._replace(name="blocks.0.feed_forward")


def averaged(*ranks, counted=False):
    """The statistics of a step, from the micro-batches of each rank; `counted`: with tokens."""
    comm.initialize()
    step = StepStatistics(torch.device("cpu"))
    for rows in ranks[comm.rank()]:
        stats = statistics(rows)
        if counted:
            stats = stats._replace(tokens=torch.tensor(float(len(rows))))
        step.add(torch.tensor(float(len(rows))), (stats,))
    step.exchange([comm.rank(), 3 << 36])
    numbers = step.numbers
    assert numbers.highest == [comm.size() - 1, 3 << 36]
    rows = [len(micro_batch) for batches in ranks for micro_batch in batches]
    assert numbers.loss == pytest.approx(sum(rows) / len(rows))
    return numbers.routing[0]


def test_an_expert_is_unused_if_no_token_of_the_step_used_it_on_any_process(workers):
    first, second = [[0.6, 0.4, 0, 0], [1, 0, 0, 0]], [[0, 1e-30, 1, 0], [0, 0, 1, 0]]
    assert [measures(statistics(rows))["unused"] for rows in (first, second)] == [0.5, 0.5]
    accumulated = workers(1).run(averaged, [first, second])
    spread = workers(2).run(averaged, [first, first], [second, first])
    assert [measures(stats)["unused"] for stats in (*accumulated, *spread)] == [0.25] * 3


@pytest.mark.parametrize("counted", [False, True])
def test_a_step_of_micro_batches_is_one_batch(workers, counted):
    first, second = [[0.6, 0.4, 0, 0], [1, 0, 0, 0]], [[0, 0, 0.5, 0.5], [0.25] * 4]
    whole = measures(statistics(first + second))
    if counted:  # padded: they weigh by their tokens
        first, second = [*first, second.pop()], second
    for stats in (*workers(1).run(averaged, [first, second], counted=counted),
                  *workers(2).run(averaged, [first], [second], counted=counted)):  # fmt: skip
        ours = measures(stats)
        assert ours.keys() == whole.keys()
        for name, value in whole.items():
            assert ours[name] == pytest.approx(value, rel=1e-6), name
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    assert whole["effective_experts"] == pytest.approx((math.exp(entropy) + 1 + 2 + 4) / 4)
    assert whole["dominant"] == [0.5, 0, 0.25, 0.25]
    assert whole["dominated"] == 0.75


def test_numbers_of_single_experts_are_short_and_zero_stays_zero():
    load = measures(statistics([[1 / 3, 2 / 3, 0]]))["load"]
    assert load == [0.333333, 0.666667, 0.0]


def test_loads_of_processes_are_recorded():
    shares = {3: [0.25, 0.25, 0.3, 0.2], 12: [0.1, 0.1, 0.2, 0.6]}
    routing = tuple(
        RoutingStats(f"blocks.{block}.feed_forward", torch.tensor(load))
        for block, load in shares.items()
    )
    record = routing_record(routing, ranks=2)
    assert record["routing/blocks.12.feed_forward/rank_load"] == pytest.approx([0.2, 0.8])
    assert record["routing/rank_load_max"] == pytest.approx(1.6)
    assert "routing/rank_load_max" not in routing_record(routing)


def test_the_entropy_of_usage_is_that_of_the_mean_scores_and_not_of_the_load():
    load, usage = torch.tensor([1.0, 0.0]), torch.tensor([0.75, 0.25])
    stats = RoutingStats("", load, usage, measures={"entropy": torch.tensor(0.1)})
    assert measures(stats)["usage_entropy"] == pytest.approx(math.log(4) - 0.75 * math.log(3))
    assert "usage" not in measures(stats)
    even = statistics([[1.0, 0, 0, 0], [0, 1.0, 0, 0]])  # decided, and both are used
    assert measures(even)["usage_entropy"] == pytest.approx(math.log(2))
    assert measures(even)["entropy"] == pytest.approx(0, abs=1e-6)


def test_the_load_of_a_sparse_gate_is_recorded_as_shares_of_what_is_in_use():
    # Of 4 assignments a token 2 have a weight above 0: the load sums to 1/2.
    active = {"active": torch.tensor(2.0)}
    stats = RoutingStats("", load_E=torch.tensor([0.3, 0.2, 0.0]), measures=active)
    found = measures(stats)
    assert found["load"] == pytest.approx([0.6, 0.4, 0])
    assert found["load_max"] == pytest.approx(1.8)
    assert found["unused"] == pytest.approx(1 / 3)
    assert found["active"] == 2
