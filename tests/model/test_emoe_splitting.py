"""Balanced k-means beside random groups and beside all groups that there are."""

import itertools

import numpy as np
import pytest
from sklearn.preprocessing import normalize

from polyad.model.emoe import balanced_kmeans, random_groups


def objective(x_FD, group_F):
    """The sum of squared distances of keys to the means of their groups."""
    means_ED = np.stack([x_FD[group_F == group].mean(0) for group in range(group_F.max() + 1)])
    return float(((x_FD - means_ED[group_F]) ** 2).sum())


def some_keys(number, width, bundles, seed=0):
    """Keys in bundles of unequal size, of unequal lengths."""
    generator = np.random.default_rng(seed)
    middles = generator.normal(size=(bundles, width))
    sizes = np.arange(1, bundles + 1)
    bundle = generator.choice(bundles, size=number, p=sizes / sizes.sum())
    keys = middles[bundle] + 0.7 * generator.normal(size=(number, width))
    return keys * generator.uniform(0.1, 10, size=(number, 1))


def test_groups_are_nearer_to_their_means_than_random_ones():
    keys = some_keys(256, 32, 8)
    x = normalize(keys)
    found = objective(x, balanced_kmeans(keys, 16, 0))
    assert found < 0.8 * objective(x, random_groups(256, 16, 0))


def test_of_few_keys_it_finds_the_best_groups_of_all():
    # Two bundles of three directions: of the 10 ways to make two groups, one is best.
    keys = np.array([[1, 0.1], [0.1, 1], [2, 0.3], [0.2, 3], [5, 0.1], [0.3, 4]])
    x = normalize(keys)

    def total(members):
        return objective(x, np.isin(np.arange(6), members).astype(np.int64))

    best = min(itertools.combinations(range(6), 3), key=total)
    group_F = balanced_kmeans(keys, 2, 0)
    assert objective(x, group_F) == pytest.approx(total(best))
    assert len({*group_F[[0, 2, 4]]}) == len({*group_F[[1, 3, 5]]}) == 1


@pytest.mark.parametrize("keys", [np.ones((12, 4)), np.zeros((12, 4)), np.eye(12)], ids=str)
def test_keys_without_bundles_have_groups_of_equal_size(keys):
    assert np.bincount(balanced_kmeans(keys, 4, 0)).tolist() == [3] * 4


def test_a_seed_decides():
    keys = some_keys(64, 8, 3)
    one, same, other = (balanced_kmeans(keys, 8, seed) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    ones, sames, others = (random_groups(64, 8, seed) for seed in (1, 1, 2))
    assert np.array_equal(ones, sames)
    assert not np.array_equal(ones, others)
    assert np.bincount(ones).tolist() == [8] * 8
