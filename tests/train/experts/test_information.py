"""Entropies, information and purity: by hand, by scikit-learn and scipy; and their intervals."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from sklearn.metrics import mutual_info_score, normalized_mutual_info_score

from polyad.model.smoe.router import Selected
from polyad.train.errors import ConfigError
from polyad.train.experts.fluctuation import encode
from polyad.train.experts.information import (
    GateEntropies,
    GroupedSums,
    entropy_bits,
    information_bits,
    measured,
    normalized_information,
    purity,
)
from polyad.train.experts.probing import Decision, RoutedLayer


@pytest.mark.parametrize(
    ("counts", "information", "normalized", "pure"),
    [
        ([[8, 0], [0, 8]], 1.0, 1.0, 1.0),  # each expert has a class of its own
        ([[4, 4], [4, 4]], 0.0, 0.0, 0.5),  # even
        ([[3, 6], [1, 2]], 0.0, 0.0, 8 / 12),  # uneven, and alike
        ([[5, 5], [0, 0]], 0.0, 0.0, 0.5),  # one expert has all
        ([[5, 0], [3, 0]], 0.0, 0.0, 1.0),  # one class is all
        # Experts 1/2, 1/4, 1/4, classes 1/2, 1/2: each expert is of one class. I = 1 bit, the
        # entropies are 1.5 and 1.
        ([[4, 0], [0, 2], [0, 2]], 1.0, 1 / 1.25, 1.0),
        # p = [[1/2, 1/4], [0, 1/4]], of experts 3/4 and 1/4, of classes 1/2 and 1/2.
        ([[2, 1], [0, 1]], 0.311278, 0.311278 / ((0.811278 + 1) / 2), 3 / 4),
        ([[0, 0], [0, 0]], 0.0, 0.0, 0.0),
    ],
)
def test_tables_by_hand(counts, information, normalized, pure):
    counts = np.array(counts, dtype=np.float64)
    assert information_bits(counts) == pytest.approx(information, abs=1e-6)
    assert normalized_information(counts) == pytest.approx(normalized, abs=1e-6)
    assert purity(counts) == pytest.approx(pure)


def test_random_tables_are_those_of_scikit_learn_and_scipy():
    generator = np.random.default_rng(0)
    tables = generator.integers(0, 9, (5, 4, 6)).astype(np.float64)
    for counts in tables:
        expert, label = (np.repeat(axis.ravel(), counts.astype(int).ravel())
                         for axis in np.indices(counts.shape))  # fmt: skip
        nats = mutual_info_score(expert, label)
        assert information_bits(counts) == pytest.approx(nats / math.log(2), rel=1e-9)
        theirs = normalized_mutual_info_score(expert, label)  # over the arithmetic mean
        assert normalized_information(counts) == pytest.approx(theirs, rel=1e-9)
        assert entropy_bits(counts.sum(1)) == pytest.approx(entropy(counts.sum(1), base=2))
    for measure in (information_bits, normalized_information, purity):
        assert measure(tables).tolist() == [float(measure(counts)) for counts in tables]


def test_an_interval_holds_the_truth_as_often_as_it_says():
    """The share of heads among 100 samples of a coin: intervals of 95%, 200 times."""
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        heads = (generator.random(100) < 0.3).astype(np.float64)
        sums = np.stack([heads, np.ones(100)], 1)
        value, low, high = measured(
            "heads", lambda each: each[..., 0] / each[..., 1], sums, 100
        ).values()
        assert low <= value <= high
        held += low <= 0.3 <= high
    assert 0.89 * 200 <= held <= 0.99 * 200


def test_intervals_are_of_samples_and_not_of_tokens():
    """Ten tokens of each sample that are alike make no interval narrower."""
    generator = np.random.default_rng(2)
    tables = np.zeros((60, 2, 2))
    tables[np.arange(60), generator.integers(0, 2, 60), generator.integers(0, 2, 60)] = 1
    one, ten = (measured("purity", purity, times * tables, 60) for times in (1, 10))
    assert one == pytest.approx(ten)
    assert 0.1 < one["purity_high"] - one["purity_low"] < 0.5
    _, low, high = measured("purity", purity, tables[:1], 1).values()
    assert math.isnan(low)
    assert math.isnan(high)
    assert one == measured("purity", purity, tables, 60)  # seeded


def test_groups_hold_equally_many_samples_at_random():
    sums = GroupedSums(1000, [10], "cpu")
    assert sums.sums_G.shape == (200, 10)
    group_A = sums.group_of(torch.arange(1000))
    assert group_A.bincount().tolist() == [5] * 200
    assert group_A[:200].tolist() != list(range(200))
    # 32 groups of so many numbers are 16 MB of a layer.
    assert len(GroupedSums(50_000, [64, 1000], "cpu").sums_G) == 32


def decided(*levels, selected=None):
    return Decision(levels=[torch.tensor(p) for p in levels], selected=selected)


def entropies_of(*levels, samples, selected=None):
    """By level: the mean entropy of a token, and that of the mean."""
    layer = RoutedLayer(name="blocks.0.feed_forward", levels=tuple(len(p[0]) for p in levels))
    gates = GateEntropies(layer, samples=3)
    gates.add(decided(*levels, selected=selected), torch.tensor(samples))
    return [(each["entropy_bits"], each["usage_entropy_bits"]) for each in gates.result()]


def test_entropies_of_gates_by_hand():
    # Tokens of samples 0, 0, 2. Entropies 0, 1, 2 and 0, 0, 1 bits.
    first = [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4]
    second = [[1.0, 0], [1.0, 0], [0.5, 0.5]]
    upper, lower = entropies_of(first, second, samples=[0, 0, 2])
    assert upper == pytest.approx((1.0, entropy([1.75, 0.75, 0.25, 0.25], base=2)))
    assert lower == pytest.approx((1 / 3, entropy([2.5, 0.5], base=2)))
    # A sparse gate's are of all of its scores, not of the experts that are selected.
    scores = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]
    one = Selected.of(torch.ones(2, 1), torch.tensor([[0], [1]]), 3)
    (result,) = entropies_of(scores, samples=[0, 1], selected=one)
    assert result == pytest.approx((1.5, entropy([0.375, 0.375, 0.25], base=2)))
    # Sigmoids become probabilities; an expert that was pruned has the score -inf.
    scores = [[0.8, 0.4, 0.4], [0.9, 0.9, -math.inf]]
    (result,) = entropies_of(scores, samples=[0, 1])
    assert result == pytest.approx(((1.5 + 1.0) / 2, entropy([0.5, 0.375, 0.125], base=2)))
    codes = encode(decided(scores))
    assert codes.entropy_M.tolist() == pytest.approx([1.5 * math.log(2), math.log(2)])
    with pytest.raises(ConfigError, match="the coefficients of blocks"):
        entropies_of([[math.nan, 0.5]], samples=[0])
