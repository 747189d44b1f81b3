"""Tests the slices of the slow tests: what is chosen, what is recorded, what is due."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import slices
from tests.slices import MAX_AGE, SLICES, Row, behind, due, problems, read_record, slice_of

pytest_plugins = ["pytester"]

SUITE = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", range(60))
def test_slow(number):
    assert number != {wrong}

def test_everyday():
    pass
"""
NAMES = {f"test_suite.py::test_slow[{number}]" for number in range(60)}
EVERYDAY = "test_suite.py::test_everyday"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of its own, for suites that tests run."""
    monkeypatch.setattr(slices, "RECORD", tmp_path / "slices.json")
    return tmp_path / "slices.json"


@pytest.fixture
def tried(pytester: pytest.Pytester, record: Path) -> Callable[..., set[str]]:
    """Runs a suite of 60 slow tests and one other with options; returns the tests that ran."""
    pytester.makeini("[pytest]\ntestpaths = .\nmarkers = slow: is long")
    pytester.makepyfile(test_suite=SUITE.format(wrong=-1))

    def run(*options: str) -> set[str]:
        done = pytester.inline_run("-p", "tests.slices", *options)
        return {each.nodeid for each in done.getreports() if getattr(each, "when", "") == "call"}

    return run


def row(run: int, failed: int = 0) -> Row:
    return {"run": run, "failed": failed, "commit": "0123abc", "date": "2026-01-31"}


def test_the_name_alone_says_the_slice(tried: Callable[..., set[str]]) -> None:
    # 3,421,780,262 is the checksum of these digits in the definition of CRC-32.
    assert slice_of("123456789") == 3_421_780_262 % 20 == 2
    of_two = {name for name in NAMES if slice_of(name) == 2}
    assert tried("--slice", "2") == of_two | {EVERYDAY}
    assert tried("-m", "slow", "--slice", "2") == of_two
    assert tried() == tried("--slice", "all") == NAMES | {EVERYDAY}


@pytest.mark.slow
def test_two_processes_choose_as_one_does(tried: Callable[..., set[str]], record: Path) -> None:
    assert tried("--slice", "2", "-n", "2") == tried("--slice", "2")
    rows = read_record()
    assert (rows[2]["run"], rows[2]["passed"], len(rows)) == (2, 3, 1)


def test_whole_runs_are_recorded_in_a_line_each(
    tried: Callable[..., set[str]], record: Path
) -> None:
    tried("--slice", "7")
    tried("-m", "slow", "--slice", "3")
    before = record.read_text()
    assert [line.partition(":")[0] for line in before.splitlines()] == ["{", '"3"', '"7"', "}"]
    rows = {int(number): row for number, row in json.loads(before).items()}
    assert (rows[7]["run"], rows[3]["run"]) == (1, 2)
    for number, said in rows.items():
        assert said["passed"] == sum(slice_of(name) == number for name in NAMES)
        assert (said["failed"], said["skipped"]) == (0, 0)
    for narrowed in (["-k", "everyday"], ["test_suite.py"], ["--deselect", min(NAMES)]):
        tried("--slice", "5", *narrowed)
        assert record.read_text() == before, narrowed


def test_a_failure_is_recorded_and_what_stops_at_one_is_not(
    tried: Callable[..., set[str]], pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_suite=SUITE.format(wrong=31))
    number = slice_of("test_suite.py::test_slow[31]")
    tried("--slice", str(number), "-x")
    assert read_record() == {}
    tried("--slice", str(number))
    assert read_record()[number]["failed"] == 1


def test_a_slice_that_is_none_is_refused() -> None:
    for word in ("20", "-1", "next", ""):
        with pytest.raises(pytest.UsageError, match="0 to 19"):
            slices.chosen_slices(word)


def test_slices_step_with_commits_and_those_passed_over_come_first() -> None:
    rows = {number: row(number + 1) for number in range(SLICES)}  # the last run was the 20th
    assert [due(rows, commits) for commits in (3, 19, 20, 41, None)] == [3, 19, 0, 1, 0]
    assert due(rows | {5: row(21), 6: row(22)}, 3) == 0  # whose run is 21 runs old
    assert due(rows | {9: row(8, failed=1)}, 3) == 9
    del rows[11]
    assert due(rows, 3) == 11


def test_the_check_names_slices_that_are_red_or_old() -> None:
    assert list(problems({number: row(number + 1) for number in range(5)})) == []
    rows = {number: row(100) for number in range(SLICES)}
    assert list(problems(rows)) == []
    rows |= {4: row(100 - MAX_AGE), 8: row(99 - MAX_AGE), 2: row(98, failed=3)}
    del rows[17]
    assert behind(rows, MAX_AGE) == [17, 8, 2]
    for line, words in zip(problems(rows), ("slice 17 ", "slice 8 ", "slice 2 "), strict=True):
        assert words in line


def test_a_clone_without_its_history_counts_no_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "empty").mkdir()
    git("init", "whole")
    for message in ("one", "two"):
        git("-C", "whole", "commit", "--allow-empty", "-m", message)
    git("clone", "--depth", "1", (tmp_path / "whole").as_uri(), "shallow")
    for folder, commits in (("empty", None), ("whole", 2), ("shallow", None)):
        monkeypatch.setattr(slices, "ROOT", tmp_path / folder)
        assert slices.commits_here() == commits
