"""Damaged data: refused by each command, or found in the background and the run ended."""

import shutil
import threading
import time
from types import SimpleNamespace

import pytest

from polyad.data.config import DataConfig
from polyad.data.text.samples import TrainingData
from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.train.guard.data_check import DataCheck
from tests.helpers.everyday import everyday
from tests.helpers.prepared import flip, rewrite
from tests.helpers.runs import records, write_config


@pytest.fixture
def copy(prepared_path, tmp_path):
    return shutil.copytree(prepared_path, tmp_path / "corpus")


def flip_in_the_middle(folder):
    """Where no opening looks."""
    path = folder / "train.bin"
    flip(path, path.stat().st_size // 4 * 2)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("validation", "bytes", -5),
        ("tokenizer", "vocab_size", "many"),
    ],
)
def test_a_manifest_with_a_wrong_value_is_one_line_in_each_command(
    finished, copy, tmp_path, capfd, section, key, value
):
    def change(tree):
        place = tree["splits"] | tree
        place = place[section] if section else tree
        place[key] = value
        return tree

    rewrite(copy, change)
    config = str(write_config(tmp_path / "config.yaml", copy))
    for words in (
        ["validate", config],
        ["train", config],
        ["evaluate", str(finished), "--data", str(copy)],
    ):
        assert polyad(words) == 2, words
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("polyad: error: ")
        assert f"{copy / 'manifest.json'}: " in line
        assert key in line
    assert not (tmp_path / "run").exists()


def check_of(folder, fail, **options):
    config = DataConfig(path=str(folder), verify=options.pop("verify", True))
    world = SimpleNamespace(is_main=True, local_rank=options.pop("local_rank", 0))
    folders = [part.data for part in TrainingData.open(config).parts] if config.verify else []
    return DataCheck(folders, world, fail, **options)


def test_a_flipped_bit_is_told_in_one_line_and_whole_data_is_not(copy, capfd):
    told = []
    with check_of(copy, told.append) as check:
        check.finish()
    assert told == []
    flip_in_the_middle(copy)
    for options in ({"verify": False}, {"local_rank": 1}):
        with check_of(copy, told.append, **options) as check:
            check.finish()
        assert told == []
    with check_of(copy, told.append) as check:
        check.finish()
    (line,) = told
    assert line.startswith(f"data.verify: {copy / 'train.bin'}: damaged: its SHA-256 is ")
    assert capfd.readouterr().err == ""


def test_it_reads_no_faster_than_it_may_and_ends_at_once(copy, capfd, monkeypatch):
    monkeypatch.setattr("polyad.train.guard.data_check.LAST_SECONDS", 0.05)
    monkeypatch.setattr("polyad.data.prepared.PIECE_BYTES", 4096)
    before = threading.active_count()
    check = check_of(copy, print, bytes_per_second=8192)
    with check:
        time.sleep(1.0)
        assert 0 < check._read <= 8192 * 2 + 4096
    assert threading.active_count() == before
    monkeypatch.setattr(
        "polyad.data.prepared.PIECE_BYTES", 1
    )  # at full speed it takes long as well
    with check_of(copy, print, bytes_per_second=8192) as check:
        check.finish()
    assert "MB of its data verified; `polyad data verify`" in capfd.readouterr().err


def test_data_that_is_gone_meanwhile_is_no_damage(copy, capfd):
    told = []
    check = check_of(copy, told.append)
    shutil.rmtree(copy)
    with check:
        check.finish()
    assert told == []
    assert "the data was not verified" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
@everyday("validating", [False, True], keep=[False])
def test_a_run_on_damaged_data_saves_its_step_and_ends_with_a_line(
    forks, copy, tmp_path, validating
):
    flip_in_the_middle(copy)
    config = write_config(tmp_path / "config.yaml", copy, log__trackers=[])
    every = ["evaluation.every=1", "evaluation.max_windows=null"] if validating else []
    words = ["train", str(config), "train.steps=100000", "checkpoint.every=0", *every]
    run = forks.start(tmp_path, words)
    assert run.wait(60) == [2, 2]
    # Found before the first step is done, or after a few: whoever is quicker.
    kept = complete_checkpoints(tmp_path / "run" / "checkpoints")
    there = (
        f"run the same command again to continue from {kept[0]}"
        if kept
        else "no checkpoint was written yet"
    )
    said = [line for line in run.text().splitlines() if line.startswith("polyad: error: data")]
    assert len(said) == 1
    assert said[0].startswith(f"polyad: error: data.verify: {copy / 'train.bin'}: damaged: ")
    assert f"; once that is fixed, {there}" in said[0]
    done = len(records(tmp_path / "run"))
    flip_in_the_middle(copy)  # mended
    words = ["train", str(config), f"train.steps={done + 2}", "checkpoint.every=0"]
    again = forks.start(tmp_path, words)
    assert again.wait(60) == [0, 0]
    assert [line["step"] for line in records(tmp_path / "run")] == list(range(1, done + 3))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_that_is_over_first_still_says_so(forks, copy, tmp_path):
    flip_in_the_middle(copy)
    config = write_config(tmp_path / "config.yaml", copy, log__trackers=[])
    run = forks.start(tmp_path, ["train", str(config), "train.steps=1"])
    assert run.wait(60) == [2, 2]
    assert f"data.verify: {copy / 'train.bin'}: damaged: " in run.text()
    assert len(complete_checkpoints(tmp_path / "run" / "checkpoints")) <= 1  # 0: before the step
    again = forks.start(tmp_path, ["train", str(config), "train.steps=2", "data.verify=false"])
    assert again.wait(60) == [0, 0]
