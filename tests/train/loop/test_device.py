"""Prefetch, TF32 and memory, as far as a CPU shows them; `tests/gpu` has the rest."""

import pytest
import torch

from tests.helpers.runs import ballast_statistics, records, run, write_config
from train.loop.device import Prefetch, allow_tf32

CPU = torch.device("cpu")


def test_prefetch_hands_out_all_batches_in_order() -> None:
    batches = [torch.full((2, 3), number) for number in range(5)]
    handed_out = list(Prefetch(iter(batches), CPU))
    assert [batch.unique().item() for batch in handed_out] == [0, 1, 2, 3, 4]
    assert list(Prefetch(iter([]), CPU)) == []


def test_prefetch_reads_one_ahead_and_nothing_before_the_first_is_wanted() -> None:
    read = []

    def batches():
        for number in range(4):
            read.append(number)
            yield torch.tensor(number)

    ahead = Prefetch(batches(), CPU)
    assert read == []
    assert next(ahead) == 0
    assert read == [0, 1]
    assert next(ahead) == 1
    assert read == [0, 1, 2]


def test_an_error_of_reading_comes_when_its_batch_is_due() -> None:
    def batches():
        yield torch.tensor(0)
        yield torch.tensor(1)
        raise ValueError("damaged")

    ahead = Prefetch(batches(), CPU)
    assert [next(ahead).item(), next(ahead).item()] == [0, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            next(ahead)


def test_tf32_changes_nothing_on_a_cpu() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision()
    allow_tf32(True, CPU)
    after = torch.backends.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision()
    assert after == before


@pytest.mark.distributed
def test_memory_is_that_of_the_process_that_took_the_most(workers) -> None:
    mib = 2**20
    both = workers(2).run(ballast_statistics, rank=1, size=700 * mib)
    assert both[0]["statistics"] == both[1]["statistics"]
    assert both[0]["statistics"]["memory_bytes"] == pytest.approx(both[1]["peak"], abs=32 * mib)
    assert both[1]["peak"] > both[0]["peak"] + 300 * mib
    assert both[0]["statistics"]["memory_reserved_bytes"] is None  # there is no allocator's reserve


@pytest.mark.distributed
def test_a_record_has_the_memory_of_its_step(workers, tmp_path, prepared_path) -> None:
    config = write_config(tmp_path / "config.yaml", prepared_path)
    workers(1).run(run, config, "train.steps=2", "train.tf32=true")
    lines = records(tmp_path / "run")
    assert all(line["memory_bytes"] > 50e6 for line in lines)
    assert all(line["memory_reserved_bytes"] is None for line in lines)
