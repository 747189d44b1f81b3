"""Global batches that are left out: by hand, against a naive count, and as each rank reads them."""

import itertools

import numpy as np
import pytest
import torch

from polyad.data.sampler import batch_of_step, batches_from, micro_batches
from polyad.data.text.samples import Part, TrainingData, TrainingSamples

T, SEED, B = 16, 5, 8


@pytest.fixture
def samples(prepared):
    return TrainingSamples(prepared.split("train"), T, SEED)


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        ([2], [0, 1, 3, 4, 5, 6]),
        ([3, 0, 4], [1, 2, 5, 6, 7, 8]),
        ([2, 2, 900], [0, 1, 3, 4, 5, 6]),
    ],
)
def test_steps_take_the_batches_that_are_left(left_out, expected):
    assert [batch_of_step(step, left_out) for step in range(6)] == expected
    for start in range(6):  # wherever a run goes on
        assert list(itertools.islice(batches_from(start, left_out), 6 - start)) == expected[start:]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (2, 2), (4, 1), (1, 8)])
def test_every_layout_leaves_the_same_batches_out(samples, ranks, micro):
    # Across the end of the epoch, which has some 40 global batches.
    start, steps = samples.samples_per_epoch // B - 4, 6
    left_out = {start + 1, start + 4, 2}
    sizes = {"global_batch_size": B, "micro_batch_size": micro, "data_parallel_size": ranks}
    read = [
        list(
            micro_batches(
                samples, start_step=start, num_steps=steps, data_parallel_rank=rank,
                left_out=left_out, **sizes,
            )
        )
        for rank in range(ranks)
    ]  # fmt: skip
    rows = torch.cat([batch for turn in zip(*read, strict=True) for batch in turn])
    # Batch 2 came before: step `start` takes batch start + 1 were it there, so start + 2 on.
    wanted = [b for b in range(start + 1, start + 20) if b not in left_out][:steps]
    expected = torch.stack([samples[b * B + i] for b in wanted for i in range(B)])
    assert torch.equal(rows, expected)


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
