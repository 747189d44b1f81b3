"""Rank correlations of measures with the score, against numbers by hand."""

from typing import Any

import pytest

from launch.study.relations import LEAST, rank_correlation, relations


def run(variant: str, seed: int, loss: float, **routing: float) -> dict[str, Any]:
    """As a finished run leaves it, as far as it is read here."""
    return {"variant": variant, "seed": seed, "loss": loss, "routing": routing}


def test_rank_correlations_by_hand() -> None:
    # One pair of five is swapped: 1 - 6 x 2 / (5 x 24).
    assert rank_correlation([1, 2, 3, 4, 5], [10, 30, 20, 40, 50]) == pytest.approx(0.9)
    assert rank_correlation([1, 2, 3], [3.0, 2.0, -7.0]) == pytest.approx(-1)
    # Two equal ones share the rank 1.5: Pearson's of (1.5, 1.5, 3) and (1, 2, 3).
    assert rank_correlation([4, 4, 9], [1, 2, 3]) == pytest.approx(1.5 / (1.5 * 2) ** 0.5)


def test_correlations_are_within_seeds_and_their_interval_is_over_seeds() -> None:
    # A seed that is worse as a whole, with more of the measure, must not count.
    falling = [run(f"v{i}", 1, 5.0 - 0.1 * i, entropy=float(i)) for i in range(5)]
    worse = [run(f"v{i}", 2, 9.0 - 0.1 * i, entropy=100.0 + i) for i in range(5)]
    swapped = [run(f"v{i}", 3, 5.0 - 0.1 * (0, 2, 1, 3, 4)[i], entropy=float(i)) for i in range(5)]
    found = relations([*falling, *worse, *swapped], "loss")["entropy"]
    assert found["values"] == pytest.approx([-1, -1, -0.9])
    assert found["seeds"] == [1, 2, 3]
    assert found["mean"] == pytest.approx(-2.9 / 3)
    half = 4.30265 * 0.0577350 / 3**0.5  # t of two degrees of freedom
    assert (found["low"], found["high"]) == pytest.approx((-2.9 / 3 - half, -2.9 / 3 + half))
    assert found["excludes_zero"]


def test_nothing_is_said_of_few_variants_of_one_number_and_of_half_a_seed() -> None:
    few = [run(f"v{i}", 1, 5.0 - 0.1 * i, entropy=float(i)) for i in range(LEAST - 1)]
    assert relations([*few, run("dense", 1, 4.0)], "loss") == {}
    same = [run(f"v{i}", 1, 5.0 - 0.1 * i, unused=0.0) for i in range(LEAST)]
    assert relations(same, "loss") == {}
    whole = [run(f"v{i}", 1, 5.0 - 0.1 * i, entropy=float(i)) for i in range(LEAST)]
    found = relations([*whole, run("v0", 2, 5.0, entropy=0.0)], "loss")
    assert found["entropy"]["seeds"] == [1]
    assert not found["entropy"]["excludes_zero"]
