"""Runs in turn: the order, the ratio that a slower minute does not change, and its interval."""

import random
import statistics

import pytest

from tests.benchmarks.comparison import (
    CONFIDENCE,
    SLOW,
    interval,
    span,
    summary,
    take_turns,
)


def recorded(turns, names=("a", "b", "c"), seconds=None, **options):
    """Takes turns with given seconds; also returns in which order the variants ran."""
    order = []

    def of(name):
        def run():
            order.append(name)
            return seconds(name, order.count(name)) if seconds else (1.0,)

        return run

    times = take_turns({name: of(name) for name in names}, turns, **options)
    return times, order


def test_every_variant_comes_first_and_follows_every_other(capfd):
    times, order = recorded(6, before=0)
    turns = ["".join(order[first : first + 3]) for first in range(0, 18, 3)]
    assert turns == ["abc", "cba", "bca", "acb", "cab", "bac"]
    assert all(len(taken) == 6 for taken in times.values())
    assert capfd.readouterr().err.splitlines()[-1].startswith("  6 of 6, ")


def test_turns_before_do_not_count(capfd):
    times, order = recorded(2, before=3, seconds=lambda name, count: (float(count), 0.5))
    assert len(order) == 15
    assert times["b"] == [(4.0, 0.5), (5.0, 0.5)]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "  1 of 3 before the clock counts"
    assert lines[3].startswith("  1 of 2, ")
    assert lines[3].endswith(" s left")


def test_a_slower_minute_changes_no_ratio():
    """Half of the turns take three times as long, a third of it the base's own."""
    pace = [1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 3.0]
    factor = {"a": 1.25, "b": 1.0, "c": 0.5}
    times, _ = recorded(7, before=0, seconds=lambda n, i: (factor[n] * pace[i - 1], 0.0))
    rows = summary(times, "b")
    assert {name: row["seconds_ratio"] for name, row in rows.items()} == factor
    assert rows["a"]["seconds_ratio_interval"] == (1.25, 1.25)
    assert rows["a"]["seconds"] == 3 * 1.25
    assert rows["a"]["timed"] == 7


def test_what_is_slow_has_the_ratio_of_its_only_turn():
    long = SLOW + 1.0
    times, order = recorded(
        5, base="a", seconds=lambda name, count: (long if name == "c" else 1.0,)
    )
    assert order.count("c") == 2  # once before the clock counts
    row = summary(times, "a")["c"]
    assert row == {
        "seconds": long, "seconds_ratio": long, "seconds_ratio_interval": None, "timed": 1,
        "parts": [long],
    }  # fmt: skip


def test_an_interval_in_a_table():
    assert span(None) == "-"
    assert span((0.98765, 1.2)) == "0.99-1.20"
    assert span((0.98765, 1.2), 3) == "0.988-1.200"


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, None), (4, None), (5, (0, 4)), (7, (0, 6)), (8, (1, 6)), (9, (1, 7)), (20, (5, 14))],
)
def test_the_interval_has_the_ranks_of_the_sign_test(count, expected):
    values = [float(value) for value in range(count)]
    random.Random(0).shuffle(values)
    assert interval(values) == expected


@pytest.mark.parametrize("count", [5, 9, 15])
def test_the_interval_holds_the_median_as_often_as_it_says(count):
    draw = random.Random(count)
    held = []
    for _ in range(4000):
        low, high = interval([draw.lognormvariate(0, 1) for _ in range(count)])
        held.append(low <= 1 <= high)  # the distribution's median
    assert CONFIDENCE - 0.01 < statistics.fmean(held) < 0.99
