"""The picture of a study: it can be read, and everything in it is where its number says."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from polyad.launch.study.figure import figure
from tests.launch.study.test_results import RUNS, SUMMARY, TEST, plan, result, summarized
from tests.launch.study.test_sentences import fitted

SVG = "{http://www.w3.org/2000/svg}"


def read(text: str) -> ElementTree.Element:
    """The root; fails if it is no XML."""
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    return root


def texts(root: ElementTree.Element) -> list[str]:
    """All that is written in it."""
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def points(curve: ElementTree.Element) -> list[tuple[float, float]]:
    """The places that a curve joins."""
    found = re.findall(r"[ML]([\d.]+) ([\d.]+)", curve.get("d") or "")
    return [(float(x), float(y)) for x, y in found]


def test_it_has_a_panel_for_each_measure_and_a_dot_for_each_seed() -> None:
    root = read(figure(SUMMARY))
    titles = [e.text for e in root.iter(f"{SVG}text") if e.get("class") == "title"]
    assert titles == [
        "Loss minus that of plain, nats per token",
        "On perturbed text, minus that of plain",
        "Share of tokens whose experts changed at the end",
        "Effective neighbours in the graph",
        "Routing entropy, nats",
        "Effect of seeing later tokens, nats per token",
    ]
    dots = [e for e in root.iter(f"{SVG}circle") if e.get("class") == "seed"]
    # Two differences of leaky, neighbours of leaky, two measures of both; two steps of the leak.
    assert len(dots) == 3 * (2 + 1 + 2 * 2 + 2)
    assert figure(SUMMARY) == figure(SUMMARY)


def test_dots_and_intervals_are_where_their_numbers_say() -> None:
    root = read(figure(summarized(plan("dense", "cp"), RUNS).model_copy(update=TEST)))
    [row] = (e for e in root.iter(f"{SVG}g") if e.get("class") == "row")
    ticks = {
        float(e.text or ""): float(e.get("x", "nan"))
        for e in root.iter(f"{SVG}text")
        if e.get("text-anchor") == "middle"
    }
    (one, at_one), (other, at_other), *_ = ticks.items()

    def place(value: float) -> float:
        return at_one + (value - one) / (other - one) * (at_other - at_one)

    found = [float(e.get("cx", "nan")) for e in row.iter(f"{SVG}circle")]
    assert found == pytest.approx([place(v) for v in (-0.21, -0.19, -0.20)], abs=0.3)
    [interval] = (e for e in row.iter(f"{SVG}line") if e.get("class") == "interval")
    ends = [float(interval.get(end, "nan")) for end in ("x1", "x2")]
    assert ends == pytest.approx([place(-0.2248), place(-0.1752)], abs=0.3)
    # Everything lies inside.
    width = float(root.get("width", "nan"))
    assert all(0 < x < width for x in [*found, *ends, *ticks.values()])


def test_one_seed_has_no_interval_and_one_variant_no_differences() -> None:
    root = read(
        figure(summarized(plan("dense", "cp", seeds=(1,)), RUNS[:2]).model_copy(update=TEST))
    )
    assert not [e for e in root.iter(f"{SVG}line") if e.get("class") == "interval"]
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")
    root = read(figure(summarized(plan("dense"), RUNS[:1]).model_copy(update=TEST)))
    assert texts(root) == []


def test_differences_over_training_are_where_their_numbers_say() -> None:
    # 0.02 at the end and 0.01 less for each e-fold, evenly over eight steps.
    root = read(figure(fitted([0.01, 0.02, 0.03], [-0.01] * 3)))
    titles = [e.text for e in root.iter(f"{SVG}text") if e.get("class") == "title"]
    assert titles[-1] == "Validation loss minus that of dense"
    assert not [text for text in texts(root) if "logarithmic" in text]  # of 8 times the first
    [line] = (e for e in root.iter(f"{SVG}path") if e.get("class") == "curve")
    places = points(line)
    heights = {
        float(e.text or ""): float(e.get("y", "nan")) - 4
        for e in root.iter(f"{SVG}text")
        if e.get("text-anchor") == "end" and (e.text or "x")[-1].isdigit()
    }
    (one, at_one), (other, at_other), *_ = heights.items()
    for step, (_, y) in enumerate(places, start=1):
        wanted = 0.02 - 0.01 * math.log(step / 8)
        assert y == pytest.approx(
            at_one + (wanted - one) / (other - one) * (at_other - at_one), abs=0.3
        )
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(places)]
    assert gaps == pytest.approx([gaps[0]] * 7, abs=0.3)
    [band] = (e for e in root.iter(f"{SVG}polygon"))
    assert len((band.get("points") or "").split()) == 2 * 8


def test_a_long_course_is_drawn_over_the_logarithm() -> None:
    def of(score: float) -> dict[str, Any]:
        steps = (1, 10, 100)
        return {"validations": [{"step": s, "tokens": 1000 * s, "score": score / s} for s in steps]}

    runs = [result("dense", 1, 4.0) | of(5.0), result("cp", 1, 4.1) | of(6.0)]
    root = read(figure(summarized(plan("dense", "cp"), runs).model_copy(update=TEST)))
    assert "by tokens seen, logarithmic; band: 95% interval of the mean" in texts(root)
    [line] = (e for e in root.iter(f"{SVG}path"))
    first, middle, last = (x for x, _ in points(line))
    assert middle == pytest.approx((first + last) / 2, abs=0.2)
    panel = [*root.iter(f"{SVG}g")][-2]  # around the curve's
    ticks = [e.text for e in panel.iter(f"{SVG}text") if e.get("text-anchor") == "middle"]
    assert ticks == ["1,000", "2,000", "5,000", "10k", "20k", "50k", "100k"]
    assert not [*root.iter(f"{SVG}polygon")]  # one pair has no interval


def test_a_spike_at_the_start_is_cut_and_does_not_flatten_the_rest() -> None:
    def of(*differences: float) -> dict[str, Any]:
        found = enumerate((0.0, *differences, 0.02, 0.01, 0.01, 0.01), start=1)
        return {"validations": [{"step": s, "tokens": 10 * s, "score": d} for s, d in found]}

    runs = [result("dense", 1, 4.0) | of(0.0), result("cp", 1, 4.1) | of(3.0)]
    runs[0]["validations"] = [each | {"score": 0.0} for each in runs[0]["validations"]]
    root = read(figure(summarized(plan("dense", "cp"), runs).model_copy(update=TEST)))
    assert not [text for text in texts(root) if "cut" in text]  # step 2 of 6 is not at the start
    runs[1]["validations"] = [
        each | {"score": 3.0 if each["step"] == 1 else 0.02} for each in runs[1]["validations"]
    ]
    root = read(figure(summarized(plan("dense", "cp"), runs).model_copy(update=TEST)))
    assert [text for text in texts(root) if text.endswith("; cut at the edges")]
    heights = [e.text for e in root.iter(f"{SVG}text") if e.get("text-anchor") == "end"]
    assert max(float(text or 0) for text in heights if text != "cp") <= 0.03
    assert not [
        e for e in root.iter(f"{SVG}circle") if float(e.get("cy", "nan")) < 44
    ]  # nothing above the panel


def test_a_file_has_its_colours_written_out_and_a_page_has_variables() -> None:
    assert "var(--" not in figure(SUMMARY)
    assert "var(--series-1)" in figure(SUMMARY, inline=True)


def test_names_are_escaped() -> None:
    found = summarized(plan("dense", "cp"), RUNS).model_copy(update={"study": "a<b>&.yaml"})
    assert (read(figure(found)).get("aria-label") or "").startswith("a<b>&.yaml: dense, cp")
