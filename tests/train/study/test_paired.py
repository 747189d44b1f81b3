"""The arithmetic of comparisons, against numbers by hand and from printed tables."""

import math

import pytest

from polyad.train.study.paired import paired_difference, spread, t_quantile


@pytest.mark.parametrize(
    # Two-sided 95%, as in any printed table of Student's t (Fisher and Yates 1963, table III).
    ("degrees", "point"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_a_quantile_is_that_of_the_tables(degrees: int, point: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(point, abs=6e-4)


def test_a_quantile_at_another_probability_is_that_of_the_tables() -> None:
    assert t_quantile(0.95, 2) == pytest.approx(2.920, abs=6e-4)
    assert t_quantile(0.995, 2) == pytest.approx(9.925, abs=6e-4)
    assert t_quantile(0.75, 1) == pytest.approx(1.0)  # Cauchy: its quartile is 1


def test_a_spread_divides_by_one_less_than_the_count() -> None:
    # Mean 4; squares of 2, 1, 1 and 2 are 10 in all; 10 / 3.
    assert spread([2.0, 3.0, 5.0, 6.0]) == (4.0, pytest.approx(math.sqrt(10 / 3)), 4)


def test_what_is_common_to_a_pair_leaves_its_difference() -> None:
    # Seeds differ by whole numbers, the variants by 0.1, 0.2 and 0.3: mean 0.2, deviation 0.1,
    # and 4.3027 x 0.1 / sqrt(3) = 0.2484 to either side.
    found = paired_difference([1.1, 5.2, 9.3], [1.0, 5.0, 9.0])
    assert found.mean == pytest.approx(0.2)
    assert found.deviation == pytest.approx(0.1)
    assert (found.low, found.high) == (
        pytest.approx(-0.0484, abs=1e-4),
        pytest.approx(0.4484, abs=1e-4),
    )
    assert found.pairs == 3
    assert not found.excludes_zero


@pytest.mark.parametrize("sign", [1, -1])
def test_an_interval_that_leaves_zero_out_says_so_on_either_side(sign: int) -> None:
    # Differences 0.21, 0.19 and 0.20: deviation 0.01, so 0.0248 to either side of 0.2.
    found = paired_difference([sign * 0.21, sign * 0.19, sign * 0.20], [0.0, 0.0, 0.0])
    assert found.excludes_zero
    assert sorted([abs(found.low), abs(found.high)]) == pytest.approx([0.1752, 0.2248], abs=1e-4)


def test_equal_runs_do_not_exclude_zero() -> None:
    found = paired_difference([1.0, 2.0], [1.0, 2.0])
    assert (found.low, found.high) == (0.0, 0.0)
    assert not found.excludes_zero


def test_a_single_pair_has_a_difference_and_no_interval() -> None:
    found = paired_difference([1.5], [1.0])
    assert found.mean == 0.5
    assert math.isnan(found.deviation)
    assert math.isnan(found.low)
    assert not found.excludes_zero
