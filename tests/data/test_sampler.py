"""Micro-batches of any number of ranks and workers are the same, and so where some are left out."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from polyad.data.errors import DataError
from polyad.data.sampler import micro_batches
from polyad.data.text.dataset import TokenStream
from polyad.data.text.samples import Part, TrainingData, TrainingSamples
from tests.helpers.everyday import everyday

ROOT = Path(__file__).resolve().parents[2]
T, SEED, B = 64, 1234, 8


@pytest.fixture
def samples(prepared):
    return TrainingSamples(prepared.split("train"), T, SEED)


def naive_epoch(stream, epoch, seed=SEED):
    """Lays the documents end to end and cuts, without the helper."""
    generator = np.random.Generator(np.random.PCG64((seed, epoch, 0)))
    bounds = np.concatenate([[0], np.cumsum(stream.document_lengths)])
    tokens = stream.read(0, stream.num_tokens)
    order = generator.permutation(stream.num_documents)
    laid = np.concatenate([tokens[bounds[d] : bounds[d + 1]] for d in order])
    count = (len(laid) - 1) // T
    rows = np.stack([laid[i * T : (i + 1) * T + 1] for i in range(count)])
    return rows[np.random.Generator(np.random.PCG64((seed, epoch, 1))).permutation(count)]


def global_batch(samples, step, ranks=1, micro=2, start=None, steps=1, workers=0):
    """The rows of one step, put together from what every rank reads."""
    start = step if start is None else start
    rows = {}
    for rank in range(ranks):
        batches = list(
            micro_batches(
                samples,
                start_step=start,
                num_steps=steps,
                global_batch_size=B,
                micro_batch_size=micro,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                num_workers=workers,
            )
        )
        per_step = B // (micro * ranks)
        assert len(batches) == steps * per_step
        mine = batches[(step - start) * per_step : (step - start + 1) * per_step]
        for number, batch in enumerate(mine):
            assert batch.shape == (micro, len(samples[0]))
            assert batch.dtype == torch.int64
            rows[number * ranks + rank] = batch
    return hashlib.sha256(torch.cat([rows[i] for i in range(len(rows))]).numpy()).hexdigest()


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_samples_equal_a_naive_computation(samples, prepared, epoch):
    expected = naive_epoch(prepared.split("train"), epoch)
    count = samples.samples_per_epoch
    assert count == len(expected)
    got = np.stack([samples[epoch * count + i].numpy() for i in range(count)])
    np.testing.assert_array_equal(got, expected)


def test_epochs_and_seeds_differ(samples, prepared):
    other = TrainingSamples(prepared.split("train"), T, SEED + 1)
    count = samples.samples_per_epoch
    first = torch.stack([samples[i] for i in range(8)])
    assert not torch.equal(first, torch.stack([samples[count + i] for i in range(8)]))
    assert not torch.equal(first, torch.stack([other[i] for i in range(8)]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_global_batch_is_the_same_on_any_number_of_ranks(prepared, ranks, micro):
    of_length = (
        TrainingSamples(prepared.split("train"), length, SEED) for length in range(T, 1, -1)
    )
    samples = next(some for some in of_length if some.samples_per_epoch % B)
    last = samples.samples_per_epoch // B  # the step that straddles two epochs
    for step in (0, 3, last, last + 1):
        expected = torch.stack([samples[g] for g in range(step * B, (step + 1) * B)])
        digest = hashlib.sha256(expected.numpy()).hexdigest()
        assert global_batch(samples, step, ranks, micro) == digest


def test_global_batch_does_not_depend_on_the_number_of_steps(samples):
    alone = global_batch(samples, 7)
    assert global_batch(samples, 7, start=0, steps=8) == alone
    assert global_batch(samples, 7, start=0, steps=40) == alone
    assert global_batch(samples, 7, start=5, steps=9, ranks=2) == alone


def test_order_is_the_one_of_earlier_versions(samples):
    # Frozen: a checkpoint resumes in the order in which its run began.
    assert samples._generator(3, 0).permutation(10).tolist() == [9, 4, 6, 8, 7, 3, 1, 5, 2, 0]


@pytest.mark.slow
def test_workers_read_the_same(samples):
    state = torch.get_rng_state()
    assert global_batch(samples, 3, start=2, steps=3, workers=2) == global_batch(samples, 3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_workers_outlive_signals(samples):
    options = {"global_batch_size": B, "micro_batch_size": B}
    batches = micro_batches(samples, start_step=0, num_steps=30, num_workers=1, **options)
    next(batches)
    for worker in batches._workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGUSR1)
    assert len(list(batches)) == 29


def test_split_shorter_than_a_sample_is_refused(prepared):
    stream = prepared.split("validation")
    TrainingSamples(stream, stream.num_tokens - 1, 0)
    with pytest.raises(
        DataError, match=rf"validation\.bin: {stream.num_tokens:,} tokens"
    ) as caught:
        TrainingSamples(stream, stream.num_tokens, 0)
    assert f"needs {stream.num_tokens + 1:,}" in str(caught.value)


def test_more_documents_than_an_order_has_room_for_are_refused(tmp_path):
    (tmp_path / "train.idx").touch()
    TrainingSamples(TokenStream(tmp_path / "train", 2**40, 2**31 - 1), 1024, 0)
    with pytest.raises(DataError, match=r"train\.idx: 2,147,483,648 documents, .*data\.mixture"):
        TrainingSamples(TokenStream(tmp_path / "train", 2**40, 2**31), 1024, 0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((12, 4, 0, 2), "global_batch_size 12: not a multiple .* = 8; 8 or 16 would fit"),
        ((3, 4, 0, 1), "= 4; 4 would fit"),
        ((8, 0, 0, 1), "micro_batch_size 0"),
        ((8, 4, 2, 2), "data_parallel_rank 2"),
        ((8, 4, 0, 0), "data_parallel_size 0"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(samples, sizes, expected):
    names = ("global_batch_size", "micro_batch_size", "data_parallel_rank", "data_parallel_size")
    with pytest.raises(DataError, match=expected):
        micro_batches(samples, start_step=0, num_steps=1, **dict(zip(names, sizes, strict=True)))


def test_memory_keeps_two_epochs(samples):
    for epoch in range(5):
        samples[epoch * samples.samples_per_epoch]
    assert sorted(samples._orders._epochs) == [3, 4]
    assert samples[0].shape == (T + 1,)


@everyday("end", ["del cycle; gc.collect()", "pass"], keep=[])
def test_a_process_ends_that_leaves_a_loader_as_garbage_or_open(end: str, tmp_path: Path) -> None:
    """Its workers ignore SIGTERM, by which torch and multiprocessing would end them.

    A batch of many tensors is still on its way, in a thread of the worker, when they have to end.
    """
    script = tmp_path / "script.py"  # of which its workers can import a class
    script.write_text(f"""
import gc
from polyad.data.sampler import micro_batches
class Cycle:
    pass
class Numbers:
    def __getitem__(self, number):
        return tuple(range(500))
if __name__ == "__main__":
    cycle = Cycle()
    cycle.batches = micro_batches(
        Numbers(), start_step=0, num_steps=9, global_batch_size=8, micro_batch_size=8,
        num_workers=2,
    )
    cycle.itself = cycle
    print(len(next(cycle.batches)))
    {end}
""")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "500\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.parametrize("epoch", [0, 3])
def test_documents_of_a_sample_are_those_whose_tokens_it_has(samples, prepared, epoch):
    lengths = prepared.split("train").document_lengths
    order = np.random.Generator(np.random.PCG64((SEED, epoch, 0))).permutation(len(lengths))
    owner = np.concatenate([np.full(lengths[d], d) for d in order])
    n = samples.samples_per_epoch
    shuffled = np.random.Generator(np.random.PCG64((SEED, epoch, 1))).permutation(n)
    for position in range(n):
        row = int(shuffled[position])
        tokens = owner[row * T : (row + 1) * T + 1]
        assert samples.documents(epoch * n + position) == list(dict.fromkeys(tokens.tolist()))


def test_documents_are_told_by_the_part_they_are_of(prepared):
    both = TrainingData([Part("a", 0.75, prepared), Part("b", 0.25, prepared)], "data.mixture")
    mixed = both.samples(T, SEED)
    told = both.documents(mixed, range(40))
    assert sorted(told) == ["a", "b"]
    places = [mixed.place(number) for number in range(40)]
    plain = TrainingSamples(prepared.split("train"), T, SEED)
    for number, name in enumerate("ab"):
        mine = {d for source, k in places if source == number for d in plain.documents(k)}
        assert told[name] == sorted(mine)
    alone = TrainingData([Part("a", 1.0, prepared)], "data.path")
    assert alone.documents(plain, [3, 4]) == {
        "a": sorted({*plain.documents(3), *plain.documents(4)})
    }
