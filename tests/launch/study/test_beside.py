"""Finished runs compared with another variant than the baseline; the study stays as it is."""

import errno
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from polyad.launch.cli import run
from polyad.launch.study.folder import held, write_record
from polyad.train.study.reading import load_studies, load_study
from tests.launch.study.conftest import CP, WriteStudy
from tests.launch.study.test_checks import refused
from tests.launch.study.test_page import finish

VARIANTS: dict[str, Any] = {
    "dense": None,
    "cp": {"model.feed_forward": CP},
    "tr": {"model.feed_forward": CP | {"factorization": "tr"}},
}
OF_SEED_1 = {"dense": 5.0, "cp": 4.7, "tr": 4.9}


def half_finished(write_study: WriteStudy, **changes: Any) -> Path:
    """A study of which seed 1 is finished and seed 2 is not; its file."""
    path = write_study(seeds=[1, 2], variants=VARIANTS, **changes)
    study = load_study(path)
    study.folder.mkdir(exist_ok=True)
    write_record(study, "of some text")
    for each in study.runs(study.variants):
        if each.seed == 1:
            finish(each, OF_SEED_1[each.variant.name])
    return path


def stored(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_differences_are_those_to_the_variant_that_is_named(
    write_study: WriteStudy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = half_finished(write_study)
    before = stored(tmp_path / "study")
    pages = ["--page", str(tmp_path / "p.html"), "--json", str(tmp_path / "r.json")]
    # Also while another start of the study is going on.
    with held(load_study(path)):
        assert run(["study", str(path), "--beside", "cp", *pages]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["baseline"] == "cp"
    differences = {n: v["difference"] for n, v in found["variants"].items()}
    assert differences["cp"] is None
    assert differences["dense"]["mean"] == pytest.approx(0.3)
    assert differences["tr"]["mean"] == pytest.approx(0.2)
    assert "dense compared with cp: one pair" in capfd.readouterr().out
    html = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "dense compared with cp: one pair" in html
    assert f"polyad study {path} --beside cp<" in html
    assert stored(tmp_path / "study") == before


def test_tasks_are_compared_with_it_each_and_in_the_mean(
    write_study: WriteStudy, tmp_path: Path, data: Path
) -> None:
    tasks = {name: {"data.path": str(data)} for name in ("one", "other")}
    path = write_study(data=None, tasks=tasks, variants=VARIANTS)
    for number, study in enumerate(load_studies(path).values()):
        write_record(study, "of some text")
        for each in study.runs(study.variants):
            # tr less cp: 0.2, and 0.4 in the other task.
            finish(each, OF_SEED_1[each.variant.name] * (1 + number))
    page = tmp_path / "p.html"
    options = ["--json", str(tmp_path / "r.json"), "--page", str(page)]
    assert run(["study", str(path), "--beside", "cp", *options]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["variants"]["tr"]["difference"]["mean"] == pytest.approx(0.3)
    of_tasks = [task["variants"]["tr"]["difference"]["mean"] for task in found["tasks"].values()]
    assert of_tasks == pytest.approx([0.2, 0.4])
    assert f"polyad study {path} --beside cp<" in page.read_text(encoding="utf-8")


def test_a_variant_that_is_none_is_one_line(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    path = half_finished(write_study)
    line = refused(path, capfd, "--beside", "ring")
    assert f"--beside: 'ring' is not a variant of {path}; variants: dense, cp, tr" in line


def test_nothing_finished_is_one_line(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_study()
    assert "no run is finished" in refused(path, capfd, "--beside", "cp")
    assert not (path.parent / "study").exists()


def test_a_folder_of_another_study_is_not_compared(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    half_finished(write_study)
    path = write_study(variants=VARIANTS | {"tr": {"model.feed_forward": CP | {"rank": 3}}})
    assert "variants.tr: model.feed_forward" in refused(path, capfd, "--beside", "cp")


@pytest.mark.parametrize("option", [["--dry-run"], ["--jobs", "2"]])
def test_what_is_about_training_does_not_go_with_it(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str], option: list[str]
) -> None:
    line = refused(write_study(), capfd, "--beside", "cp", *option)
    assert f"--beside: cp is not allowed with {option[0]}" in line


def test_a_study_without_its_measures_is_not_finished(
    write_study: WriteStudy, tmp_path: Path
) -> None:
    path = write_study(attack={"rate": 0.1, "seed": 0}, variants=VARIANTS)
    study = load_study(path)
    write_record(study, "of some text")
    for each in study.runs(study.variants):
        finish(each, OF_SEED_1[each.variant.name])
    assert run(["study", str(path), "--beside", "cp", "--json", str(tmp_path / "r.json")]) == 0
    assert not json.loads((tmp_path / "r.json").read_text())["finished"]


@pytest.mark.parametrize(
    ("file", "damaged", "said"),
    [
        (
            "runs/cp/seed-1.json",
            {"routing": ...},
            "has no routing, so it was not written by a study",
        ),
        (
            "study.json",
            {"variants": [1]},
            "variants is not a section of keys, so this file was not written by a study",
        ),
    ],
)
def test_a_file_that_no_study_wrote_is_one_line(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str], file: str, damaged: Any, said: str
) -> None:
    path = half_finished(write_study)
    place = load_study(path).folder / file
    tree = json.loads(place.read_text()) | damaged
    place.write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))
    assert said in refused(path, capfd, "--beside", "cp")


def test_a_folder_on_a_disk_without_locks_is_used(
    write_study: WriteStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with held(load_study(write_study())):
        pass
