"""The first section of a page: a line for each expert, whose numbers are those of the measures."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy.stats import norm

from polyad.train.experts.by_class import LevelByClass
from polyad.train.experts.class_changes import Change
from polyad.train.experts.knockout import ExpertWithout, Harmed
from polyad.train.experts.probing import RoutedLayer
from polyad.train.report.command import report
from polyad.train.report.lines import most_harmed
from tests.helpers.pages import Page
from tests.helpers.runs import knockout, run, write_config

SMOE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 32}
TOKENS = 2000


@pytest.fixture(scope="module")
def trained(workers, tmp_path_factory, prepared_path):
    folder = tmp_path_factory.mktemp("run")
    section = {"model__feed_forward": SMOE, "train__steps": 12}
    workers(1).run(run, write_config(folder / "config.yaml", prepared_path, **section))
    return folder / "run"


class Lines(HTMLParser):
    """The lines of a page: by anchor what they say, in their order."""

    def __init__(self, text):
        super().__init__()
        self.said, self.data, self._inside = {}, {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "li" and "data-place" in given:
            self._inside = given["id"]
            self.said[self._inside], self.data[self._inside] = "", given

    def handle_endtag(self, tag):
        self._inside = "" if tag == "li" else self._inside

    def handle_data(self, data):
        if self._inside:
            self.said[self._inside] += data


@pytest.mark.distributed
def test_lines_have_the_numbers_of_the_knock_out_and_the_largest_come_first(
    trained, workers, tmp_path
):
    asked = {"layers": ["0", "1"], "experts": ["0", "2", "3"]}
    result = report(trained, output=tmp_path / "page.html", tokens=TOKENS, knockout=True, **asked)
    # What `polyad experts knockout` says of the same tokens.
    (found,) = workers(1).run(knockout, trained, split="validation", tokens=TOKENS, **asked)
    lines = Lines((tmp_path / "page.html").read_text())
    assert len(lines.said) == 8
    by_anchor = {each["anchor"]: each for each in result["experts"]}
    changes = []
    for name, layer in found["layers"].items():
        block = name.split(".")[1]
        for row, expert in enumerate(layer["experts"]):
            anchor = f"b{block}e{expert}"
            said, line = lines.said[anchor], by_anchor[anchor]
            every = layer["by"]["all"]
            change, whole = every["change"]["value"][row][0], every["tokens"][0]
            changes.append((-abs(change), anchor))
            assert line["change"]["value"] == change
            assert f"{change:+.4f}" in said
            candidates = []
            for by, table in layer["by"].items():
                for column, class_ in enumerate(table["classes"]):
                    tokens, (value, low) = table["tokens"][column], (
                        table["change"][key][row][column] for key in ("value", "low")
                    )  # fmt: skip
                    if not by.startswith(("predicted ", "read ")) or tokens < 50:
                        continue
                    # The change of all tokens is the mean of both parts, by their tokens.
                    elsewhere = (change * whole - value * tokens) / (whole - tokens)
                    # One in 40 of 26 classes in all may lie above by chance.
                    wider = norm.ppf(1 - 0.025 / 26) / norm.ppf(0.975)
                    if value - wider * (value - low) > max(0, elsewhere):
                        candidates.append((value, by, class_, elsewhere))
            if not candidates:
                assert line["most_harmed"] is None
                assert "No class stands out" in said
                continue
            value, by, class_, elsewhere = max(candidates)
            assert (line["most_harmed"]["by"], line["most_harmed"]["class"]) == (by, class_)
            assert line["change_elsewhere"] == pytest.approx(elsewhere)
            assert f"without it {value:+.4f} [" in said
            assert f"nats there, elsewhere {elsewhere:+.4f}" in said
    assert [anchor for _, anchor in sorted(changes)] == list(lines.said)[:6]
    assert set(list(lines.said)[6:]) == {"b0e1", "b1e1"}  # not left out
    assert {"b0e1-top", "b1e1-top"}.isdisjoint(Page((tmp_path / "page.html").read_text()).ids)


@pytest.mark.distributed
def test_without_a_knock_out_lines_claim_no_purpose_and_the_largest_share_comes_first(
    trained, tmp_path
):
    result = report(trained, output=tmp_path / "page.html", tokens=TOKENS)
    text = (tmp_path / "page.html").read_text()
    lines = Lines(text)
    assert "ithout it" not in "".join(lines.said.values())
    division = result["text"]["division"]
    for name, levels in division.items():
        counts = np.array(levels[0]["labels"]["characters"]["counts"])
        shares = counts.sum(1) / counts.sum()
        for expert, share in enumerate(shares):
            said = lines.said[f"b{name.split('.')[1]}e{expert}"]
            assert f"{100 * share:.1f}% of assignments" in said
            if match := re.search(r"Its share of (.+) is ([\d.]+) \[([\d.]+), ", said):
                named, times, low = match[1], float(match[2]), float(match[3])
                assert low >= 1
                lifts = [
                    (np.array(each["counts"]) / np.array(each["counts"]).sum(0))[expert]
                    / share
                    for each in levels[0]["labels"].values()
                ]  # fmt: skip
                classes = [c for each in levels[0]["labels"].values() for c in each["classes"]]
                by_class = dict(zip(classes, np.concatenate(lifts), strict=True))
                class_ = named.removeprefix("positions ").removesuffix(" by frequency")
                assert times == pytest.approx(by_class[class_], abs=0.0051)
            else:
                assert ("No class stands out" if share else "Not used by any") in said
    order = [float(each["data-share"]) for each in lines.data.values()]
    assert order == sorted(order, reverse=True)
    places = {anchor: int(each["data-place"]) for anchor, each in lines.data.items()}
    assert sorted(places, key=places.get) == [f"b{b}e{e}" for b in range(2) for e in range(4)]


@pytest.mark.distributed
def test_anchors_are_unique_and_links_lead_to_them_and_sections_stand_in_order(trained, tmp_path):
    report(trained, output=tmp_path / "page.html", tokens=TOKENS, layers=["1"])
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    inside = [link for link in page.links if link.startswith("#")]
    assert set(inside) <= {f"#{one}" for one in page.ids}
    assert {f"b1e{expert}" for expert in range(4)} <= set(page.ids)
    assert "b0e0" not in page.ids  # its block was not read
    sections = re.findall(r'<section id="([\w-]+)"', text)
    assert sections == ["experts", "layers", "division", "loss", "time", "loads"]
    # Without the script the list is as it is: only what needs it is hidden.
    hidden = re.findall(r"<(\w+)[^>]* hidden", text)
    assert hidden == ["form"]


@pytest.mark.distributed
def test_top_tokens_stand_in_the_file_and_line_that_is_named(trained, prepared_path, tmp_path):
    result = report(trained, output=tmp_path / "page.html", tokens=TOKENS)
    text = (tmp_path / "page.html").read_text()
    experts = [expert for layer in result["text"]["layers"].values() for expert in layer]
    tops = [top for expert in experts for top in expert["top_words"]]
    assert len({top["file"] for top in tops}) > 1
    for top in tops:
        assert f"{top['file']}, line {top['line']:,}, token {top['offset']:,}" in text
        name, _, number = top["file"].partition("#")
        assert name == "validation.jsonl"
        lines = (prepared_path.parent / name).read_text().splitlines()
        document = json.loads(lines[int(number)])["text"]
        assert top["token"].strip() in document.split("\n")[top["line"] - 1]


def test_anchors_of_levels_of_a_mixer_and_of_a_head():
    def anchor(name, expert):
        return RoutedLayer(name=name, levels=(4, 2)).anchor(expert)

    assert anchor("blocks.3.feed_forward", "2") == "b3e2"
    assert anchor("blocks.3.feed_forward", "1.2") == "b3l1e2"
    assert anchor("blocks.3.token_feed_forward", "2") == "b3-token-e2"
    assert anchor("blocks.3.channel_feed_forward", "2") == "b3-channel-e2"
    assert anchor("head", "0.2") == "head-l0e2"


def test_the_class_that_is_named_loses_more_than_all_others():
    def harmed(name, tokens, value, low):
        return Harmed("predicted characters", name, tokens, Change(value, low, 2 * value - low))

    def named(*classes, change):
        without = ExpertWithout(
            Change(change, 0, 1), Change(0, 0, 0), None, {"predicted": [*classes]}
        )
        found = most_harmed(without, 100)
        return found and (found.harmed.name, pytest.approx(found.elsewhere))

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
        experts=["0", "1"], groups=["a", "b"], counts_SY=4 * counts_SY,
        counts_GSY=np.stack([counts_SY] * 4), samples=4, by_chance=0.0,
    )  # fmt: skip
    classes, lifts = level.highest_lifts()
    assert classes == [0, 1]
    # 30/40 over 40/100; 50/60 over 60/100.
    np.testing.assert_allclose(lifts, [[1.875] * 3, [50 / 36] * 3])
    few = LevelByClass(
        experts=["0", "1"], groups=["a", "b"], counts_SY=counts_SY / 20,
        counts_GSY=np.stack([counts_SY / 80] * 4), samples=4, by_chance=0.0,
    )  # fmt: skip
    assert np.isnan(few.highest_lifts()[1]).all()  # fewer than 5 tokens are expected
