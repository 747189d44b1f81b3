"""Runs in turn: the order, the ratio that a slower minute does not change, and its interval."""

import random

import pytest

from tests.benchmarks.comparison import SLOW, interval, span, summary, take_turns


def recorded(turns, seconds=lambda name, count: (1.0,), **options):
    """Takes turns with given seconds; also returns in which order the variants ran."""
    order = []

    def of(name):
        def run():
            order.append(name)
            return seconds(name, order.count(name))

        return run

    return take_turns({name: of(name) for name in "abc"}, turns, **options), "".join(order)


def test_every_variant_comes_first_and_follows_every_other():
    times, order = recorded(6, before=0)
    assert order == "abccbabcaacbcabbac"
    assert all(len(taken) == 6 for taken in times.values())


def test_turns_before_do_not_count(capfd):
    times, order = recorded(2, before=3, seconds=lambda name, count: (float(count), 0.5))
    assert len(order) == 15
    assert times["b"] == [(4.0, 0.5), (5.0, 0.5)]
    lines = capfd.readouterr().err.splitlines()
    assert ["1 of 3" in lines[0], "1 of 2" in lines[3]] == [True] * 2


def test_a_slower_minute_changes_no_ratio():
    """Half of the turns take three times as long, a third of it the base's own."""
    pace = [1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 3.0]
    factor = {"a": 1.25, "b": 1.0, "c": 0.5}
    times, _ = recorded(7, before=0, seconds=lambda n, i: (factor[n] * pace[i - 1], 0.0))
    rows = summary(times, "b")
    assert {name: row["seconds_ratio"] for name, row in rows.items()} == factor
    assert rows["a"]["seconds_ratio_interval"] == (1.25, 1.25)
    assert (rows["a"]["seconds"], rows["a"]["timed"]) == (3 * 1.25, 7)


def test_what_is_slow_has_the_ratio_of_its_only_turn():
    long = SLOW + 1.0
    times, order = recorded(5, base="a", seconds=lambda n, i: (long if n == "c" else 1.0,))
    assert order.count("c") == 2  # once before the clock counts
    row = summary(times, "a")["c"]
    assert (row["seconds_ratio"], row["seconds_ratio_interval"], row["timed"]) == (long, None, 1)
    assert span(None) == "-"
    assert span((0.98765, 1.2), 3) == "0.988-1.200"


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, None), (4, None), (5, (0, 4)), (7, (0, 6)), (8, (1, 6)), (9, (1, 7)), (20, (5, 14))],
)
def test_the_interval_has_the_ranks_of_the_sign_test(count, expected):
    values = [float(value) for value in range(count)]
    random.Random(0).shuffle(values)
    assert interval(values) == expected
