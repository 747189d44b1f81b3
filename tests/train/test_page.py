"""Charts and texts of pages."""

import math
import re

from polyad.train.page import Axis, interval, interval_axis, line_chart, load_matrix, number, signs


def test_text_cannot_become_markup():
    chart = line_chart("t<i>", {"<script>": [(1, 1.0), (2, 3.0)]})
    assert "t&lt;i&gt;" in chart
    assert "&lt;script&gt;" in chart
    assert "<script" not in load_matrix("<script>", {"<script>": [1.0, 1.0]})
    assert signs("\x00\x1b\r\n") == "\u2400\u241b⏎\n"


def test_numbers_and_ticks_are_round():
    assert [number(x) for x in (0, 0.5, 12345.6, 1e-5)] == ["0", "0.5", "12,346", "1.00e-05"]
    assert Axis(0, 1, 0, 100).ticks(5) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert Axis(-3, 47, 0, 100).ticks(5) == [0, 10, 20, 30, 40]
    assert Axis(0.6, 9, 0, 100, of_ratios=True).ticks() == [1, 2, 4, 8]


def test_intervals_stand_on_one_axis():
    axis = interval_axis([0.5, -0.25, 1.0, math.nan], of_ratios=False)
    assert (axis.low, axis.high) == (-0.25, 1.0)
    svg = interval(axis, 0.5, 0.0, 1.0)
    # 1.25 nats over 176 pixels, from pixel 12 on.
    x, width = map(
        float, re.search(r'class="bar" x="([\d.]+)" y="5" width="([\d.]+)"', svg).groups()
    )
    assert (x, width) == (round(12 + 0.25 * 140.8, 1), 140.8)
    assert f'cx="{12 + 0.75 * 140.8:.1f}"' in svg
    assert "rect" not in interval(axis, 0.5, math.nan, math.nan)
    ratios = interval_axis([2.0, 4.0], of_ratios=True)
    assert (ratios(1.0), ratios(2.0), ratios(4.0)) == (12, 100, 188)


def test_a_curve_of_one_point_is_a_dot():
    assert "circle" in line_chart("t", {"a": [(5, 2.0)]})


def test_many_loads_are_sorted_and_share_cells():
    svg = load_matrix("t", {"block 0": [0.0, 2.0], "block 1": [float(n) for n in range(128)]})
    assert "block 0, expert 1: 2.00 times" in svg
    assert svg.count("<rect") == 2 + 64
    assert "block 1, experts 0 to 1 by load: 126.50 times" in svg
