"""Micro-batches of any number of ranks and workers are the same, and so where some are left out."""

import itertools
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from xxhash import xxh3_64_intdigest

from polyad.data.sampler import micro_batches
from polyad.data.text.dataset import TokenStream
from polyad.data.text.samples import Part, TrainingData, TrainingSamples, shuffled
from tests.helpers.everyday import everyday


def permutation(count, key):
    """The permutation of `polyad.data.text.samples.shuffled`, as a list."""
    half = 3
    while 4**half < count:
        half += 1
    side = 2**half
    left, right = np.divmod(np.arange(side**2), side)
    for number in range(4):
        table = [xxh3_64_intdigest(f"{key}/{number}/{value}".encode()) for value in range(side)]
        mixed = np.array([value % side for value in table])
        left, right = right, left ^ mixed[right]
    following = (left * side + right).tolist()
    found = []
    for number in range(count):
        number = following[number]
        while number >= count:
            number = following[number]
        found.append(number)
    return found


ROOT = Path(__file__).resolve().parents[2]
T, SEED, B = 64, 1234, 8


@pytest.fixture
def samples(prepared):
    return TrainingSamples(prepared.split("train"), T, SEED)


def naive_epoch(stream, epoch, seed=SEED):
    """Cuts the file's tokens and shuffles the pieces."""
    tokens = np.fromfile(stream.prefix.with_suffix(".bin"), np.uint16)
    count = (len(tokens) - 1) // T
    rows = np.stack([tokens[i * T : (i + 1) * T + 1] for i in range(count)])
    return rows[permutation(count, f"{seed}/{epoch}")]


def global_batch(samples, step, ranks=1, micro=2, start=None, steps=1, workers=0):
    """The rows of one step, put together from what every rank reads."""
    start = step if start is None else start
    per_step = B // (micro * ranks)
    rows = {}
    for rank in range(ranks):
        batches = list(
            micro_batches(
                samples, start_step=start, num_steps=steps, global_batch_size=B,
                micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=ranks,
                num_workers=workers,
            )
        )  # fmt: skip
        assert len(batches) == steps * per_step
        for number, batch in enumerate(batches[(step - start) * per_step :][:per_step]):
            assert (batch.shape, batch.dtype) == ((micro, len(samples[0])), torch.int64)
            rows[number * ranks + rank] = batch
    return torch.cat([rows[i] for i in range(len(rows))])


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_samples_equal_a_naive_computation(samples, prepared, epoch):
    expected = naive_epoch(prepared.split("train"), epoch)
    count = samples.samples_per_epoch
    assert count == len(expected)
    got = np.stack([samples[epoch * count + i].numpy() for i in range(count)])
    np.testing.assert_array_equal(got, expected)


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
        assert torch.equal(global_batch(samples, step, ranks, micro), expected)


def test_global_batch_does_not_depend_on_the_number_of_steps(samples):
    alone = global_batch(samples, 7)
    for others in ({"start": 0, "steps": 40}, {"start": 5, "steps": 9, "ranks": 2}):
        assert torch.equal(global_batch(samples, 7, **others), alone)


FROZEN = [3, 9, 0, 1, 8, 2, 5, 7, 4, 6]
LARGE = [1386331530, 9829880427, 6188764190]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 63, 64, 65, 1000, 4097])
def test_an_order_has_each_number_once(count):
    order = [shuffled(number, count, "5/2") for number in range(count)]
    assert order == permutation(count, "5/2")
    assert sorted(order) == list(range(count))


def test_the_order_is_frozen():
    # A checkpoint resumes in the order in which its run began.
    assert [shuffled(number, 10, "1234/3") for number in range(10)] == FROZEN
    assert [shuffled(number, 10**10, "1234/3") for number in range(3)] == LARGE


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 16, 40])
def test_orders_are_uniform(count):
    """The numbers of the first two places, by Pearson's test over 4,000 keys."""
    keys = [f"{seed}/0" for seed in range(4000)]
    pairs = [(shuffled(0, count, key), shuffled(1, count, key)) for key in keys]
    every = list(itertools.permutations(range(count), 2))
    drawn = Counter(pairs)
    assert chisquare([drawn[pair] for pair in every]).pvalue > 1e-3
    for place in (0, 1):
        drawn = Counter(pair[place] for pair in pairs)
        assert chisquare([drawn[number] for number in range(count)]).pvalue > 1e-3


def test_any_step_of_a_large_folder_is_read_at_once(tmp_path):
    """9 billion tokens, of which none but the sample's are read, and nothing is written."""
    total = 9_000_000_001
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(2 * total)  # of zeros, without room on the disk
    begun = time.perf_counter()
    for sample in range(10**12, 10**12 + 5):
        samples = TrainingSamples(TokenStream(tmp_path / "train", total, 1, 300), 1024, SEED)
        assert samples[sample].tolist() == [0] * 1025
    assert time.perf_counter() - begun < 1  # reading it all takes much longer
    assert [path.name for path in tmp_path.iterdir()] == ["train.bin"]


@everyday("end", ["del cycle; gc.collect()", "pass"], keep=[])
def test_a_process_ends_that_leaves_a_loader_as_garbage_or_open(end, tmp_path):
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
    owner = np.repeat(np.arange(len(lengths)), lengths)
    n = samples.samples_per_epoch
    for position, row in enumerate(permutation(n, f"{SEED}/{epoch}")):
        tokens = owner[row * T : (row + 1) * T + 1]
        assert samples.documents(epoch * n + position) == list(dict.fromkeys(tokens.tolist()))


def test_documents_are_told_by_the_part_they_are_of(prepared):
    both = TrainingData([Part("a", 0.75, prepared), Part("b", 0.25, prepared)], "data.mixture")
    mixed = both.samples(T, SEED)
    documents = both.documents(mixed, range(40))
    assert sorted(documents) == ["a", "b"]
    places = [mixed.place(number) for number in range(40)]
    plain = TrainingSamples(prepared.split("train"), T, SEED)
    for number, name in enumerate("ab"):
        mine = {d for source, k in places if source == number for d in plain.documents(k)}
        assert documents[name] == sorted(mine)
    alone = TrainingData([Part("a", 1.0, prepared)], "data.path")
    assert alone.documents(alone.samples(T, SEED), [3, 4]) == {
        "a": sorted({*plain.documents(3), *plain.documents(4)})
    }
