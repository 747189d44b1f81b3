"""Balanced k-means beside exact assignments and beside all groups that there are."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from sklearn.preprocessing import normalize

from polyad.model.emoe import splitting
from polyad.model.emoe.splitting import (
    assign,
    balanced_kmeans,
    objective,
    random_groups,
)


def exact(cost_FE, size):
    """The cheapest assignment: each group stands there as often as it has room."""
    keys, columns = linear_sum_assignment(np.repeat(cost_FE, size, axis=1))
    group_F = np.zeros(len(cost_FE), dtype=np.int64)
    group_F[keys] = columns // size
    return group_F


def some_keys(number, width, bundles, seed=0):
    """Keys in bundles of unequal size, of unequal lengths."""
    generator = np.random.default_rng(seed)
    middles = generator.normal(size=(bundles, width))
    sizes = np.arange(1, bundles + 1)
    bundle = generator.choice(bundles, size=number, p=sizes / sizes.sum())
    keys = middles[bundle] + 0.7 * generator.normal(size=(number, width))
    return keys * generator.uniform(0.1, 10, size=(number, 1))


@pytest.mark.parametrize(
    ("number", "width", "groups"), [(128, 16, 8), (256, 32, 16), (256, 32, 32)]
)
def test_the_objective_is_that_of_exact_assignments_within_a_thousandth(
    monkeypatch, number, width, groups
):
    keys = some_keys(number, width, groups // 2)
    x = normalize(keys)
    found, theirs = [], []
    for seed in range(8):  # of one start alone, chance says who ends lower
        found.append(objective(x, balanced_kmeans(keys, groups, seed)))
        with monkeypatch.context() as patched:
            patched.setattr(splitting, "assign", exact)
            theirs.append(objective(x, balanced_kmeans(keys, groups, seed)))
    assert np.mean(found) <= 1.001 * np.mean(theirs)
    assert np.mean(found) < 0.8 * objective(x, random_groups(number, groups, 0))


def test_an_assignment_is_near_the_cheapest_one_and_balanced():
    x = normalize(some_keys(256, 16, 5))
    cost_FE = cdist(x, x[::16], "sqeuclidean")
    ours, cheapest = assign(cost_FE, 16), exact(cost_FE, 16)
    keys = np.arange(256)
    assert np.bincount(ours).tolist() == [16] * 16
    assert cost_FE[keys, cheapest].sum() <= cost_FE[keys, ours].sum()
    assert cost_FE[keys, ours].sum() < 1.03 * cost_FE[keys, cheapest].sum()


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


@pytest.mark.parametrize("groups", [1, 12])
def test_one_group_and_as_many_as_keys(groups):
    group_F = balanced_kmeans(some_keys(12, 3, 2), groups, 0)
    assert np.bincount(group_F).tolist() == [12 // groups] * groups


def test_a_seed_decides():
    keys = some_keys(64, 8, 3)
    one, same, other = (balanced_kmeans(keys, 8, seed) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    ones, sames, others = (random_groups(64, 8, seed) for seed in (1, 1, 2))
    assert np.array_equal(ones, sames)
    assert not np.array_equal(ones, others)
    assert np.bincount(ones).tolist() == [8] * 8
