"""Prefetch, durations of steps and memory, as far as a CPU shows them; `tests/gpu` has the rest."""

from typing import NamedTuple

import pytest
import torch

from polyad.train.loop import profiling
from polyad.train.loop.profiling import Prefetch, StepTimer
from tests.helpers.runs import highest_memory, records, run_with_slow_records


def test_a_step_ends_where_the_next_begins_and_scores_are_set_aside(monkeypatch):
    now = 100.0
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now)
    timer = StepTimer()
    now = 103.0
    assert timer.step() == 3.0
    now = 104.0
    with timer.paused():  # 1 second after the step, 5 seconds of scores, 2 seconds of step
        now = 109.0
    now = 111.0
    assert timer.step() == 3.0


@pytest.mark.distributed
def test_the_throughput_of_a_step_pays_for_the_record_before(workers, config, tmp_path):
    workers(1).run(run_with_slow_records, config, 0.5, "train.steps=4")
    for line in records(tmp_path / "run")[2:]:  # the record of a step is written during the next
        assert line["step_seconds"] > 0.5
        assert line["tokens_per_second"] < 2 * 8 * 32  # tokens of a step in half a second


CPU = torch.device("cpu")


class Numbers(NamedTuple):
    values: torch.Tensor
    twice: torch.Tensor


def numbers(value: int, *shape: int) -> Numbers:
    return Numbers(torch.full(shape, value), torch.full(shape, 2 * value))


def test_prefetch_hands_out_all_batches_in_order_and_reads_one_ahead() -> None:
    read = []

    def batches():
        for number in range(4):
            read.append(number)
            yield numbers(number, 2, 3)

    ahead = Prefetch(batches(), CPU)
    assert read == []  # before the first is wanted
    for number, batch in enumerate(ahead):
        assert read == list(range(min(number + 2, 4)))
        assert batch.values.unique().item() == number
        assert batch.twice.unique().item() == 2 * number
    assert list(Prefetch(iter([]), CPU)) == []


def test_the_wait_for_batches_is_that_of_a_step(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now)

    def late():
        nonlocal now
        for seconds in (2, 3, 4):
            now += seconds
            yield numbers(seconds)

    ahead = Prefetch(late(), CPU)
    assert next(ahead).values == 2
    now += 10  # a step
    assert ahead.waited == ahead.seconds() == 2 + 3  # two are read for the first
    assert [batch.values.item() for batch in ahead] == [3, 4]
    assert ahead.seconds() == 4.0


@pytest.mark.distributed
def test_every_process_learns_the_highest_memory(workers) -> None:
    mib = 2**20
    (first, peak_0), (second, peak_1) = workers(2).run(highest_memory, rank=1, size=700 * mib)
    assert first == second
    assert first == pytest.approx(peak_1, abs=32 * mib)
    assert peak_1 > peak_0 + 300 * mib
