"""Charts and texts of pages."""

import re
import struct
import zlib

import numpy as np

from polyad.train.page.charts import LEFT, Line, line_chart, ticks
from polyad.train.page.html import Figure, Table
from polyad.train.page.matrices import _indices, _png, heat_map
from polyad.train.page.template import number, visible


def test_the_steps_below_a_heat_map_stand_under_their_columns():
    # Columns of 1, 2, 3, 4 and 100, each a fifth of the plot: 100 stands in the last one's middle.
    svg = heat_map([1, 2, 3, 4, 100], np.ones((1, 5)), ["expert 0: x"], title="t").__html__()
    places = dict(re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="middle">([\d,]+)<', svg))
    assert {step: float(x) for x, step in places.items()}["100"] == LEFT + 978 * 0.9


def test_text_cannot_become_markup():
    assert visible("<script>&\"'") == "&lt;script&gt;&amp;&#34;&#39;"
    assert visible("\x00\x1b") == "\u2400\u241b"


def test_numbers_and_ticks_are_round():
    assert [number(x) for x in (0, 0.5, 12345.6, 1e-5)] == ["0", "0.5", "12,346", "1.00e-05"]
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-3, 47) == [0, 10, 20, 30, 40]


def test_a_chart_has_gaps_where_nothing_is_known_and_needs_no_two_points():
    line = Line(label="a", values=[1.0, None, 3.0], colour="red")
    svg = line_chart([1, 2, 3], [line], title="t<i>").__html__()
    assert svg.count("M") == 2
    assert "t&lt;i&gt;" in svg
    one = Line(label="a", values=[2.0], colour="red")
    assert "circle" in line_chart([5], [one], title="t").__html__()
    none = Line(label="a", values=[None], colour="red")
    assert "No numbers" in line_chart([5], [none], title="t").__html__()


def test_a_heat_map_is_an_image_whose_unused_cells_are_transparent():
    relative = np.array([[0.0, 1.0, 16.0], [1 / 16, 1e-9, 99.0]])
    indices = _indices(relative)
    # 255 colours over 8 octaves: even load is the middle one.
    assert indices.tolist() == [[0, 128, 255], [1, 1, 255]]
    image = _png(indices)
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", image[16:24]) == (3, 2)
    at = image.index(b"IDAT")
    (size,) = struct.unpack(">I", image[at - 4 : at])
    assert zlib.decompress(image[at + 4 : at + 4 + size]) == b"\0\x00\x80\xff\0\x01\x01\xff"


def test_what_a_table_holds_is_escaped_and_of_many_classes_some_are_shown():
    rows = [(f"<b>{n}", f"{n}") for n in range(23)]
    table = Table(heads=("class & more", "n"), rows=rows, by_class=True)
    html = Figure(heading="a < b", body=table, caption="'", wide=True).__html__()
    assert html.startswith('<figure class="wide table">')
    assert "<h3>a &lt; b</h3>" in html
    assert "class &amp; more" in html
    assert "<b>" not in html
    shown, _, others = html.partition("the other 3 classes")
    assert shown.count("<td") == 2 * 20
    assert others.count("<td") == 2 * 3
