"""Results that were kept, shown again without their runs, and those that are shipped."""

import json
from pathlib import Path

import pytest

from polyad.launch.cli import run
from polyad.launch.study.folder import write_json
from polyad.launch.study.page import page
from polyad.launch.study.result import Result, StudyResult, kept_result
from polyad.launch.study.results import over_tasks
from polyad.launch.study.tables import result_table
from polyad.train.results import json_value
from polyad.train.study.reading import load_study
from tests.launch.study.conftest import WriteStudy
from tests.launch.study.test_beside import half_finished
from tests.launch.study.test_checks import refused
from tests.launch.study.test_page import of
from tests.launch.study.test_results import SUMMARY
from tests.launch.study.test_sentences import compared

SHIPPED = sorted(Path("configs/studies/results").glob("*.json"))
TASKS = {"one": of(compared([0.1, 0.2, 0.3])), "other": of(compared([0.3, 0.2, 0.1]))}
RESULTS: dict[str, Result] = {
    "pairs": of(compared([0.1, 0.2, 0.3])),
    "one pair": of(compared([0.1])),
    "all measures": of(SUMMARY),
    "tasks": over_tasks(TASKS, ["one", "other"]),
}


@pytest.mark.parametrize("name", list(RESULTS))
def test_a_kept_result_says_what_the_study_said(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = RESULTS[name]
    write_json(tmp_path / "kept.json", found.to_json())
    files = ("--page", str(tmp_path / "page.html"), "--figure", str(tmp_path / "figure.svg"))
    assert run(["study", str(tmp_path / "kept.json"), "--markdown", *files]) == 0
    assert capfd.readouterr().out == result_table(found, markdown=True) + "\n"
    assert (tmp_path / "page.html").read_text() == page(found)
    assert (tmp_path / "figure.svg").read_text().startswith("<svg")
    assert run(["study", str(tmp_path / "kept.json"), "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out) == json_value(found)


def test_what_a_study_has_written_is_shown_where_its_runs_are_gone(
    write_study: WriteStudy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = half_finished(write_study)
    kept = tmp_path / "kept.json"
    assert run(["study", str(path), "--beside", "dense", "--json", str(kept)]) == 0
    said = capfd.readouterr().out
    path.unlink()
    assert run(["study", str(kept)]) == 0
    assert capfd.readouterr().out == said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dry-run",), "--dry-run: is not allowed with"),
        (("--jobs", "2"), "--jobs: is not allowed with"),
        (("--beside", "cp"), "--beside: is not allowed with"),
    ],
)
def test_a_kept_result_is_not_trained(
    options: tuple[str, ...], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "kept.json", RESULTS["pairs"].to_json())
    assert words in refused(tmp_path / "kept.json", capfd, *options)


def test_what_is_no_result_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "none.json: cannot be read" in refused(tmp_path / "none.json", capfd)
    for text in ("{", "[]", '{"study": "a.yaml"}'):
        (tmp_path / "other.json").write_text(text)
        assert "other.json: " in refused(tmp_path / "other.json", capfd)
    assert "has no baseline, so it was not written by a study" in refused(
        tmp_path / "other.json", capfd
    )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_result_stands_in_tables_that_name_its_study(path: Path) -> None:
    found = kept_result(path)
    assert isinstance(found, StudyResult)
    study = load_study(Path(found.study))
    assert path.stem == study.file.stem
    assert found.finished is True
    assert set(found.variants) & {variant.group for variant in study.variants.values()}
    pages = [one.read_text() for one in sorted(Path("docs/findings").glob("*.md"))]
    pages += Path("configs/README.md").read_text().split("\n### ")
    tables = "\n".join(text for text in pages if f"studies/{path.stem}.yaml" in text)
    first = found.scores[0]
    for name, variant in found.variants.items():
        assert f"{variant.scores[first.name].mean:.{first.digits}f}" in tables, name
    assert page(found)
