"""Rank correlations of measures with the score, against numbers by hand."""

from typing import Any

import pytest

from polyad.launch.study.relations import LEAST, rank_correlation, relations


def measured(*runs: tuple[int, list[tuple[float, float]]]) -> dict[int, dict[str, Any]]:
    """Of each seed pairs of loss and entropy, a variant each."""
    return {
        seed: {f"v{i}": {"loss": loss, "entropy": x} for i, (loss, x) in enumerate(pairs)}
        for seed, pairs in runs
    }


def test_rank_correlations_by_hand() -> None:
    # One pair of five is swapped: 1 - 6 x 2 / (5 x 24).
    assert rank_correlation([1, 2, 3, 4, 5], [10, 30, 20, 40, 50]) == pytest.approx(0.9)
    assert rank_correlation([1, 2, 3], [3.0, 2.0, -7.0]) == pytest.approx(-1)
    # Two equal ones share the rank 1.5: Pearson's of (1.5, 1.5, 3) and (1, 2, 3).
    assert rank_correlation([4, 4, 9], [1, 2, 3]) == pytest.approx(1.5 / (1.5 * 2) ** 0.5)


def test_correlations_are_within_seeds_and_their_interval_is_over_seeds() -> None:
    # A seed that is worse as a whole, with more of the measure, must not count.
    falling = [(5.0 - 0.1 * i, float(i)) for i in range(5)]
    worse = [(9.0 - 0.1 * i, 100.0 + i) for i in range(5)]
    swapped = [(5.0 - 0.1 * (0, 2, 1, 3, 4)[i], float(i)) for i in range(5)]
    found = relations(measured((1, falling), (2, worse), (3, swapped)), "loss")["entropy"]
    assert found.values == pytest.approx([-1, -1, -0.9])
    assert found.seeds == [1, 2, 3]
    assert found.mean == pytest.approx(-2.9 / 3)
    half = 4.30265 * 0.0577350 / 3**0.5  # t of two degrees of freedom
    assert (found.low, found.high) == pytest.approx((-1, -2.9 / 3 + half))  # cut at -1
    assert found.excludes_zero


def test_nothing_is_said_of_few_variants_of_one_number_and_of_half_a_seed() -> None:
    falling = [(5.0 - 0.1 * i, float(i)) for i in range(LEAST)]
    few = measured((1, falling[1:]))
    few[1]["dense"] = {"loss": 4.0}
    assert relations(few, "loss") == {}
    assert relations(measured((1, [(loss, 0.0) for loss, _ in falling])), "loss") == {}
    found = relations(measured((1, falling), (2, falling[:1])), "loss")
    assert found["entropy"].seeds == [1]
    assert not found["entropy"].excludes_zero
