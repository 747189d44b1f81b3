"""The page of a study: whole, alone, and of what is finished; read as a browser would."""

import json
import re
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from polyad.launch.cli import run
from polyad.launch.study.folder import prepared, write_record
from polyad.launch.study.page import page
from polyad.launch.study.result import About, StudyResult, TasksResult
from polyad.launch.study.results import over_tasks
from polyad.launch.study.run import compare_finished
from polyad.launch.study.sentences import UNCORRECTED, answers
from polyad.launch.study.state import about
from polyad.train.study.reading import load_studies, load_study
from polyad.train.study.study import Run
from tests.launch.study.conftest import CP, LEAKY, WriteStudy
from tests.launch.study.test_results import SUMMARY, result
from tests.launch.study.test_sentences import compared, fitted

EMPTY = ("meta", "br")
ABOUT: dict[str, Any] = {
    **{"question": "Is cp better?", "not_shown": ["Nothing of size.", "Nothing of speed."]},
    **{"base": "b.yaml", "data": "d", "source": None, "common": {"log.every": "5"}},
    "variants": {"dense": {}, "cp": {"model.feed_forward": '{"kind": "mumoe"}'}},
    "grids": {"dense": {}, "cp": {"optimizer.learning_rate": "[0.1, 0.2]"}},
    **{"leaking": [], "days": ["2026-11-01", "2026-11-03"], "environments": []},
}
TRAINING = {"steps": 400, "tokens_per_step": 1024}


class Reader(HTMLParser):
    """Text of a page by the heading above it; fails where elements are not nested."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, list[str]] = {"": []}
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag in EMPTY:
            return
        self.open.append(tag)
        if tag == "footer":
            self.sections[tag] = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.sections[data] = []
        elif data.strip() and self.open[-1] != "style":
            self.sections[[*self.sections][-1]].append(data)
            if "tr" in self.open:
                self.rows[-1][-1] += data

    def text(self, heading: str) -> str:
        """All that stands below a heading."""
        return " ".join(self.sections[heading])


def of(found: StudyResult, **about: Any) -> StudyResult:
    """A result with what a study's file says of it."""
    trained = {"training": TRAINING}
    variants = {name: each.model_copy(update=trained) for name, each in found.variants.items()}
    return found.model_copy(update={"variants": variants, "about": About(**ABOUT | about)})


def test_a_page_has_the_question_the_answer_and_how_it_was_found() -> None:
    found = of(fitted([0.02] * 3, [-0.01] * 3))
    html = page(found)
    read = Reader(html)
    assert [*read.sections] == [
        *("", "What the intervals say", "Figure", "Tables", "How it was made"),
        *("What it does not show", "footer"),
    ]
    assert "Is cp better?" in read.text("")
    assert "not finished" not in html
    said = read.text("What the intervals say")
    for sentence in answers(found):
        assert f"{sentence}." in said
    assert UNCORRECTED in said
    assert "lower is better" in said
    assert "Validation loss minus that of dense" in read.text("Figure")
    assert ["variant", "loss", "perplexity", "difference", "95% interval", "pairs"] in read.rows
    assert any(row[0] == "cp - dense" for row in read.rows)
    made = read.text("How it was made")
    for words in (
        *("polyad study s.yaml", "2026-11-01 to 2026-11-03", "b.yaml", "1, 2, 3", "log.every: 5"),
        "d; 400 steps of 1,024 tokens; scored on the 50 tokens of the test split",
        "unknown: the run folders do not exist",
    ):
        assert words in made, words
    keys = 'model.feed_forward: {"kind": "mumoe"}; optimizer.learning_rate: [0.1, 0.2] tried'
    assert ["cp", keys] in read.rows
    assert ["dense, the baseline", "no keys of its own"] in read.rows
    assert read.text("What it does not show") == "Nothing of size. Nothing of speed."


def test_a_page_needs_nothing_beside_itself() -> None:
    html = page(of(fitted([0.02] * 3, [-0.01] * 3)))
    assert not Reader(html).tags & {"script", "link", "img", "iframe", "object"}
    found = re.findall(r"https?://[^\"' ]*", html)
    assert set(found) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    [drawing] = re.findall(r"<svg.*?</svg>", html, re.S)
    assert "<style>" not in drawing  # it is the page's
    assert "var(--series-1)" in drawing


def test_what_a_file_says_cannot_become_part_of_the_page() -> None:
    bad = "<script>alert(1)</script>&\"'"
    about = {"question": bad, "not_shown": [bad], "variants": {"dense": {}, "cp": {"a.b": bad}}}
    html = page(of(compared([0.1, 0.2]), **about).model_copy(update={"study": f"{bad}.yaml"}))
    assert "script" not in Reader(html).tags
    assert html.count("&lt;script&gt;alert(1)") >= 4


def test_a_page_says_of_what_it_is_made() -> None:
    environment = {
        **{"git_commit": "abc123", "versions": {"torch": "2.0"}, "platform": "Linux", "gpus": []},
        **{"uncommitted_changes": False, "runs": 4},
    }
    changed = environment | {"uncommitted_changes": True, "runs": 2}
    found = of(compared([0.1, 0.2]), environments=[environment, changed], not_shown=[])
    read = Reader(page(found))
    made = read.text("How it was made")
    assert "abc123; torch 2.0; Linux; no GPU (4 runs)" in made
    assert "abc123 with uncommitted changes; torch 2.0; Linux; no GPU (2 runs)" in made
    assert "The study's file does not state" in read.text("What it does not show")


def test_an_unfinished_study_says_so_at_the_top() -> None:
    unfinished = compared([0.1, 0.2], num_runs=6)
    read = Reader(page(of(unfinished)))
    assert "This study is not finished : 4 of its runs are, and" in read.text("")


def test_tasks_are_each_a_part_of_the_page() -> None:
    one, other = of(compared([0.1, 0.2, 0.3])), of(compared([0.3, 0.2, 0.1]), data="e")
    found = over_tasks({"one": one, "other": other}, ["one", "other", "third"])
    read = Reader(page(found))
    assert "This study is not finished : 12 of its runs are" in read.text("")
    # Means over tasks are of what all tasks have, and there is none of the third.
    assert "No comparison is possible yet." in read.text("What the intervals say")
    for task, part in (("one", one), ("other", other)):
        assert f"{answers(part)[0]}." in read.text(f"Task {task}")
    made = read.text("How it was made")
    assert "Task other e; 400 steps" in made
    found = over_tasks({"one": one, "other": other}, ["one", "other"])
    assert answers(found)[0].startswith("cp is worse than dense: mean loss over tasks")
    assert f"{answers(found)[0]}." in Reader(page(found)).text("What the intervals say")


def test_every_measure_of_a_study_is_on_its_page() -> None:
    about = {"variants": {"plain": {}, "leaky": {}}, "grids": {"plain": {}, "leaky": {}}}
    read = Reader(page(of(SUMMARY, **about)))
    tables = read.text("Tables")
    for heading in ("Scores", "On perturbed data", "Routing", "Effect of seeing later tokens"):
        assert heading in read.sections["Tables"], heading
    assert "at a rate of 0.1 (seed 0)" in tables


def finish(run_of_study: Run, loss: float) -> None:
    """Leaves what a finished run does: its result, and two validations."""
    folder = run_of_study.folder
    folder.mkdir(parents=True)
    records = [
        {"step": step, "tokens": 128 * step, "validation_loss": loss + 1 / step} for step in (2, 4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    environment = {
        **{"git_commit": "abc123", "git_diff": "", "versions": {"torch": "2.0"}},
        **{"platform": "Linux", "gpus": []},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    found = result(run_of_study.variant.name, run_of_study.seed, loss, step=4)
    run_of_study.result_file.write_text(json.dumps(found))


def test_a_finished_study_gives_its_page_without_training(
    write_study: WriteStudy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_study(seeds=[1, 2], question="Is cp better?", not_shown="Nothing of size.")
    study = load_study(path)
    write_record(study, prepared(study))
    for each in study.runs(study.variants):
        finish(each, 5.0 - 0.1 * (each.variant.name == "cp") - 0.01 * each.seed)
    started = time.monotonic()
    assert run(["study", str(path), "--page", str(tmp_path / "page.html")]) == 0
    assert time.monotonic() - started < 20
    out = capfd.readouterr().out
    sentence = (
        "cp is better than dense: loss -0.1000 nats per token, 95% interval -0.1000 to -0.1000, "
        "2 pairs"
    )
    assert sentence in out.splitlines()
    read = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert f"{sentence}." in read.text("What the intervals say")
    assert "Is cp better?" in read.text("")
    assert "Nothing of size." in read.text("What it does not show")
    made = read.text("How it was made")
    assert "abc123; torch 2.0; Linux; no GPU (4 runs)" in made
    assert ["cp", f"model.feed_forward: {json.dumps(CP)}"] in read.rows
    assert ["cp - dense", "-0.1000 *", "-0.1000 *"] in read.rows
    stored = json.loads((study.folder / "results.json").read_text())
    assert stored["about"]["question"] == "Is cp better?"
    assert [each["step"] for each in stored["variants"]["cp"]["curve"]] == [2, 4]


def test_keys_are_said_as_the_file_has_them(write_study: WriteStudy) -> None:
    study = load_study(
        write_study(
            variants={"dense": None, "again": None, "leaky": {"model.feed_forward": LEAKY}},
            from_runs={"again": {"distill.teacher": "dense"}},
            grids={"leaky": {"optimizer.learning_rate": [2.0e-5, 0.1]}},
        )
    )
    found = about(study, []).model_dump()
    assert found["common"] == {"optimizer.learning_rate": "0.01", "log.trackers": "[]"}
    assert found["variants"]["again"] == {"distill.teacher": "the run of dense"}
    assert json.loads(found["variants"]["leaky"]["model.feed_forward"]) == LEAKY
    assert found["grids"]["leaky"] == {"optimizer.learning_rate": "[2e-05, 0.1]"}
    assert (found["question"], found["not_shown"], found["days"]) == (None, [], [])
    assert found["environments"] == []


def test_what_is_finished_of_tasks_is_compared_without_the_others(
    write_study: WriteStudy, data: Path
) -> None:
    tasks = {name: {"data.path": str(data)} for name in ("one", "other")}
    path = write_study(data=None, tasks=tasks)
    assert compare_finished(path) is None
    study = load_studies(path)["other"]
    write_record(study, "of some text")
    first, second = study.runs(study.variants)
    finish(first, 5.0)
    finish(second, 4.5)
    found = compare_finished(path)
    assert isinstance(found, TasksResult)
    assert not found.finished
    assert [*found.tasks] == ["other"]
    read = Reader(page(found))
    assert "This study is not finished : 2 of its runs are" in read.text("")
    assert "one pair of runs, so there is no interval: loss -0.5000 nats per token" in read.text(
        "Task other"
    )
    assert not (study.folder / "results.json").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_study_whose_run_fails_leaves_a_page_of_what_is_finished(
    write_study: WriteStudy, tmp_path: Path, polyad: Any
) -> None:
    # A rate that makes steps infinite: known only once it runs.
    wild = {
        **{"optimizer.kind": "sgd", "optimizer.learning_rate": 1e6},
        **{"optimizer.clip_grad_norm": 0.0, "train.max_skipped_steps": 2},
    }
    path = write_study(variants={"dense": None, "wild": wild}, common={"train.steps": 9})
    study = load_study(path)
    write_record(study, prepared(study))
    finish(next(study.runs(study.variants)), 5.0)
    html = tmp_path / "page.html"
    done: subprocess.CompletedProcess[str] = polyad("study", path, "--page", html)
    assert done.returncode == 1, done.stderr
    read = Reader(html.read_text(encoding="utf-8"))
    assert "This study is not finished : 1 of its runs are" in read.text("")
