"""The rows of a page: one for each expert, whose numbers are those of the measures."""

from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from polyad.train.experts.by_class import LevelByClass
from polyad.train.report.command import report
from polyad.train.report.held_out import harms
from polyad.train.results import Tables
from tests.helpers.pages import Page
from tests.helpers.runs import atlas, counts_of, frame_of

SMOE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 32}
TOKENS = 2000


@pytest.fixture(scope="module")
def trained(run_of):
    return run_of(model__feed_forward=SMOE, train__steps=12)


class Rows(HTMLParser):
    """The text of each cell of a page's experts, by anchor and label, in their order."""

    def __init__(self, text):
        super().__init__()
        self.rows, self._row, self._label = {}, None, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "tr":
            self._row = self.rows.setdefault(given["id"], {}) if "id" in given else None
        if tag in ("td", "th"):
            self._label = given.get("data-label", given.get("class", tag))

    def handle_data(self, data):
        if self._row is not None:
            self._row[self._label] = (self._row.get(self._label, "") + data).strip()


def cells(folder):
    return Rows((folder / "page.html").read_text()).rows


def shown(value, low, high, form):
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


@pytest.mark.distributed
def test_rows_have_the_numbers_of_the_knockout_and_the_largest_come_first(
    trained, workers, tmp_path
):
    options = {"layers": ["0", "1"], "experts": ["0", "2", "3"]}
    result = report(trained, output=tmp_path / "page.html", tokens=TOKENS, knockout=True, **options)
    # What `polyad experts atlas` says of the same tokens.
    (results,) = workers(1).run(atlas, trained, split="validation", tokens=TOKENS, **options)
    for name in ("harmed", "classes"):
        assert result["knockout"][name] == results[name]
    page = cells(tmp_path)
    rows = {each["anchor"]: each for each in result["experts"]}
    assert list(page) == list(rows)
    assert len(rows) == 6
    assert any(row["class"] for row in rows.values())
    values = [row["value"] for row in rows.values()]
    assert values == sorted(values, reverse=True)
    for anchor, row in rows.items():
        told = page[anchor]
        expert = {"module": row["layer"], "expert": int(row["expert"])}
        if row["class"]:
            classes = frame_of(results, "classes", **expert, by=row["by"])
            (effect,) = classes[classes["class"] == row["class"]].to_dict("records")
            assert told["Elsewhere"] == f"{row['elsewhere']:+.2f}"
        else:
            (effect,) = frame_of(results, "experts", **expert).to_dict("records")
            assert told["Class of tokens"] == "no class stands out"
        ends = [effect[f"change{end}"] for end in ("", "_low", "_high")]
        assert [row["value"], row["low"], row["high"]] == ends
        assert shown(*ends, "+.2f") in told["Change of loss without it"]


@pytest.mark.distributed
def test_without_a_knockout_rows_have_the_numbers_of_the_specialization(trained, tmp_path):
    result = report(trained, output=tmp_path / "page.html", tokens=TOKENS)
    assert result["knockout"] is None
    page, rows = cells(tmp_path), result["experts"]
    assert list(page) == [row["anchor"] for row in rows]
    assert sorted(page) == [f"blocks.{b}.feed_forward.{e}" for b in range(2) for e in range(4)]
    whole = Page((tmp_path / "page.html").read_text())
    assert len(set(whole.ids)) == len(whole.ids)
    assert set(whole.links) <= {f"#{one}" for one in whole.ids}
    for row in rows:
        expert, results = int(row["expert"]), result["specialization"]
        counts_SY = counts_of(results, row["layer"], "characters")
        share = (counts_SY.sum(1) / counts_SY.sum())[expert]
        assert row["share"] == pytest.approx(share)
        told = page[row["anchor"]]
        assert told["Share of assignments"] == f"{100 * share:.2f}%"
        if not row["class"]:
            assert told["Gets most of"] in ("no class stands out", "not used by what was read")
            continue
        counts = frame_of(results, "counts", module=row["layer"], by=row["by"])
        classes = sorted(counts["class"].unique())
        counts_SY = counts_of(results, row["layer"], row["by"], classes)
        column = classes.index(row["class"])
        lift_Y = counts_SY[expert] / counts_SY.sum(0) / share
        others_S = np.delete(counts_SY, column, axis=1).sum(1)
        assert row["low"] >= 1
        assert row["value"] == pytest.approx(lift_Y[column])
        assert row["elsewhere"] == pytest.approx(others_S[expert] / others_S.sum() / share)
        assert shown(row["value"], row["low"], row["high"], ".2f") in told["Times its share"]
        assert told["Elsewhere"] == f"{row['elsewhere']:.2f}"


def test_the_class_that_is_named_loses_more_than_all_others():
    place = {"module": "blocks.0.feed_forward", "level": 0, "expert": 0}

    def change_of(value, low):
        return {"change": value, "change_low": low, "change_high": 2 * value - low}

    def harmed(name, tokens, value, low):
        of_class = {"by": "predicted characters", "class": name, "tokens": tokens}
        return place | of_class | change_of(value, low)

    def named(*classes, change):
        frames = {
            "experts": pd.DataFrame([place | change_of(change, 0)]),
            "harmed": pd.DataFrame([*classes], columns=[*harmed("", 0, 0, 0)]),
            "classes": pd.DataFrame(
                [{"by": "predicted characters"}, {"by": "predicted frequency"}]
            ),
        }
        (effect,) = harms(Tables(facts={"tokens_scored": 100}, frames=frames)).values()
        if not effect.name:
            assert effect.value.value == change
            return None
        return effect.name, pytest.approx(effect.elsewhere)

    # 0.3 over 20 of 100 tokens, 0.1 over all: (10 - 6) / 80 elsewhere.
    assert named(harmed("digits", 20, 0.3, 0.2), change=0.1) == ("digits", 0.05)
    # The interval reaches down to what all others lose.
    assert named(harmed("digits", 20, 0.3, 0.04), change=0.1) is None
    # By itself it is beyond noise, as the highest of 13 it is not.
    assert named(harmed("digits", 20, 0.3, 0.1), change=0.1) is None
    # The largest is not beyond noise, another is.
    classes = harmed("digits", 20, 0.3, 0.04), harmed("letters", 50, 0.15, 0.1)
    assert named(*classes, change=0.1) == ("letters", 0.05)
    # All tokens are of the class: there is no elsewhere.
    assert named(harmed("letters", 100, 0.1, 0.09), change=0.1) is None
    assert named(change=0.1) is None


def test_the_highest_lift_and_its_interval_by_hand():
    # Two experts, two classes, four equal samples: draws are all the same.
    counts_SY = np.array([[30.0, 10.0], [10.0, 50.0]])
    level = LevelByClass(
        groups=["a", "b"], counts_GSY=np.stack([counts_SY] * 4), samples=4, by_chance=0.0
    )
    classes, lifts = level.highest_lifts()
    assert classes == [0, 1]
    # 30/40 over 40/100; 50/60 over 60/100.
    np.testing.assert_allclose(lifts, [[1.875] * 3, [50 / 36] * 3])
    few = LevelByClass(
        groups=["a", "b"], counts_GSY=np.stack([counts_SY / 80] * 4), samples=4, by_chance=0.0
    )
    assert np.isnan(few.highest_lifts()[1]).all()  # fewer than 5 tokens are expected
