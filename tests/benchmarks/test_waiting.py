"""Where a process stands still in a step: by hand, and in real processes of which one sleeps."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import Work

from polyad.parallel.dims import Dims
from polyad.parallel.plan.traffic import Amount, Exchange
from polyad.train.config.rules import validate
from polyad.train.config.run import load_config
from polyad.train.forecast.step import footprint
from polyad.train.layout.small import small_config
from tests.benchmarks.waiting import Call, Step, Stood, Waiting, divide
from tests.helpers.waiting import DOZING, around_a_sleep, measured_steps
from tests.train.forecast.test_footprint import vocabulary_of

SUM = Exchange("all-reduce", "data", "float32")
GATHER = Exchange("all-gather", "data", "float32")
ROWS = Exchange("all-to-all", "expert", "float32")


def test_parts_of_a_step_by_hand():
    """Two processes; times in seconds.

    The first is let go at 10, the second at 11, and they end at 20 and 19.

    sum     came at 12 and 15, went on at 16 and 17: the first waits 3 and moves 1, the second 2
    gather  begun at 16.5 and 17, waited for from 18.5 and 17.5, on at 19 and 18.5: both had come
            before either waited; 2 and 0.5 beside what is computed
    """
    first = Step(10.0, 20.0, [Call("a", SUM, 12, 12, 16), Call("a", GATHER, 16.5, 18.5, 19)])
    second = Step(11.0, 19.0, [Call("a", SUM, 15, 15, 17), Call("a", GATHER, 17, 17.5, 18.5)])
    one, other = divide([first, second])
    assert one.of == {SUM: Stood(3, 1, 0), GATHER: Stood(0, 0.5, 2)}
    assert other.of == {SUM: Stood(0, 2, 0), GATHER: Stood(0, 1, 0.5)}
    assert one[:4] == (10 - 4.5, 3, 1.5, 2)
    # The step is from 10 to 20; the second process waited 1 before it and 1 after its own end.
    assert other[:4] == (8 - 3, 2, 3, 0.5)
    assert all(sum(parts[:3]) == 10 for parts in (one, other))


def test_an_early_wait_is_for_the_last_one_only_until_it_comes():
    """Begun at 1, waited for from 2; the other comes at 3, bytes have moved by 3.25.

    A root of a broadcast may go on before others have come: all of that is waiting.
    """
    calls = [[Call("a", SUM, 1, 2, 3.25)], [Call("a", SUM, 3, 3, 3.25)]]
    one, other = divide([Step(0, 4, each) for each in calls])
    assert one.of[SUM] == Stood(1, 0.25, 1)
    assert other.of[SUM] == Stood(0, 0.25, 0)
    calls = [[Call("a", SUM, 1, 1, 2)], [Call("a", SUM, 5, 5, 6)]]
    early, _ = divide([Step(0, 9, each) for each in calls])
    assert early.of[SUM] == Stood(1, 0, 0)


def test_calls_are_matched_by_group_and_order():
    """Ranks 0 and 1 share group a, 0 and 2 share group b; b's calls come between a's."""
    zero = [Call("a", SUM, 1, 1, 4), Call("b", ROWS, 4, 4, 9), Call("a", SUM, 9, 9, 10)]
    one = [Call("a", SUM, 3, 3, 4), Call("a", SUM, 6, 6, 10)]
    two = [Call("b", ROWS, 8, 8, 9)]
    parts = divide([Step(0, 10, calls) for calls in (zero, one, two)])
    assert parts[0].of == {SUM: Stood(2, 2, 0), ROWS: Stood(4, 1, 0)}
    assert parts[1].of == {SUM: Stood(3, 2, 0)}
    assert parts[2].of == {ROWS: Stood(0, 1, 0)}
    assert parts[2][:3] == (9, 0, 1)


def test_pytorchs_wait_is_its_own_again_after_an_error():
    own = Work.wait
    watch = Waiting(Dims(world_size=1), 0, torch.device("cpu"))
    with watch:
        assert Work.wait is not own
    with pytest.raises(RuntimeError, match="size of tensor"), watch:
        torch.ones(2) + torch.ones(3)
    assert Work.wait is own
    assert watch.calls() == []


LAYOUTS = [
    ("gpt2/124m.yaml", ("parallel.zero_stage=3",)),
    ("gpt2/124m.yaml", ("parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true")),
    ("gpt2/124m-smoe-16.yaml", ("parallel.expert_parallel_size=2",)),
]
"""Collectives of DeepSpeed, megatron-core, autograd and ours, at once and beside others."""


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_group")
@pytest.mark.distributed
@pytest.mark.parametrize(("file", "overrides"), LAYOUTS)
def test_real_steps_send_what_is_forecast_and_their_parts_add_up(workers, file, overrides):
    given = load_config(Path("configs") / file, [*vocabulary_of(file), *overrides])
    config = small_config(given, 2)
    found = workers(2).run(measured_steps, config)
    forecast = footprint(config, validate(config, 2)).exchanges
    total: dict[Exchange, Amount] = {}
    for each in found:
        assert len(each.watched.calls) == sum(amount.calls for amount in each.exchanges.values())
        for key, amount in each.exchanges.items():
            total[key] = total.get(key, Amount()) + amount
    assert total == {key: amount.times(2) for key, amount in forecast.items()}
    steps = [each.watched for each in found]
    whole = max(step.ended for step in steps) - min(step.began for step in steps)
    for step, parts in zip(steps, divide(steps), strict=True):
        assert parts.computing + parts.waiting + parts.moving == pytest.approx(whole)
        assert min(parts[:4]) >= 0
        for key, stood in parts.of.items():
            assert stood.moving > 0, key  # each kind was waited for
        # A process does one thing after the other, so it cannot stand still in two at once.
        still = sorted((call.waited, call.returned) for call in step.calls)
        assert all(one[1] <= next_[0] for one, next_ in pairwise(still))
        assert still[0][0] >= step.began
        assert still[-1][1] <= step.ended
    if "zero_stage=3" in overrides[0]:
        assert all(parts.beside > 0 for parts in divide(steps))


ASLEEP = 1.0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_process_that_sleeps_before_a_collective_makes_the_other_one_wait(workers):
    overrides = ("parallel.zero_stage=1", "train.global_batch_size=4", "train.micro_batch_size=2")
    given = load_config(Path("configs/gpt2/124m.yaml"), [*vocabulary_of("gpt2"), *overrides])
    config = small_config(given, 2)
    found = workers(2).run(around_a_sleep, config, ASLEEP)
    before, after = (divide([each[turn].watched for each in found]) for turn in range(2))
    other = 1 - DOZING

    def grown(rank, part):
        return getattr(after[rank], part) - getattr(before[rank], part)

    assert grown(other, "waiting") == pytest.approx(ASLEEP, abs=0.3)
    assert grown(DOZING, "computing") == pytest.approx(ASLEEP, abs=0.3)
    for rank, part in ((DOZING, "waiting"), (other, "computing"), (0, "moving"), (1, "moving")):
        assert abs(grown(rank, part)) < 0.3, (rank, part)
