"""Prefetch, TF32 and memory, as far as a CPU shows them; `tests/gpu` has the rest."""

from typing import NamedTuple

import pytest
import torch

from polyad.train.loop import profiling
from polyad.train.loop.profiling import Prefetch, allow_tf32
from tests.helpers.runs import highest_memory, records, run, write_config

CPU = torch.device("cpu")


class Numbers(NamedTuple):
    values: torch.Tensor
    twice: torch.Tensor


def numbers(value: int, *shape: int) -> Numbers:
    return Numbers(torch.full(shape, value), torch.full(shape, 2 * value))


def test_prefetch_hands_out_all_batches_in_order() -> None:
    batches = [numbers(number, 2, 3) for number in range(5)]
    handed_out = list(Prefetch(iter(batches), CPU))
    assert [batch.values.unique().item() for batch in handed_out] == [0, 1, 2, 3, 4]
    assert [batch.twice.unique().item() for batch in handed_out] == [0, 2, 4, 6, 8]
    assert list(Prefetch(iter([]), CPU)) == []


def test_prefetch_reads_one_ahead_and_nothing_before_the_first_is_wanted() -> None:
    read = []

    def batches():
        for number in range(4):
            read.append(number)
            yield numbers(number)

    ahead = Prefetch(batches(), CPU)
    assert read == []
    assert next(ahead).values == 0
    assert read == [0, 1]
    assert next(ahead).values == 1
    assert read == [0, 1, 2]


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


def test_tf32_changes_nothing_on_a_cpu() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision()
    allow_tf32(True, CPU)
    after = torch.backends.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision()
    assert after == before


@pytest.mark.distributed
def test_every_process_learns_the_highest_memory(workers) -> None:
    mib = 2**20
    (first, peak_0), (second, peak_1) = workers(2).run(highest_memory, rank=1, size=700 * mib)
    assert first == second
    assert first == pytest.approx(peak_1, abs=32 * mib)
    assert peak_1 > peak_0 + 300 * mib


@pytest.mark.distributed
def test_a_record_has_the_memory_of_its_step(workers, tmp_path, prepared_path) -> None:
    config = write_config(tmp_path / "config.yaml", prepared_path)
    workers(1).run(run, config, "train.steps=2", "train.tf32=true")
    assert all(line["memory_bytes"] > 50e6 for line in records(tmp_path / "run"))
