"""A disk that is full, and a run's folder that is gone: one line, and where the run goes on."""

from pathlib import Path

import pytest

from polyad.launch.cli import run as polyad
from tests.helpers.everyday import everyday
from tests.helpers.lost_disk import (
    error_of_a_full_tensorboard,
    run_that_loses_its_folder,
    run_with_full_records,
)
from tests.helpers.runs import records, run, write_config

pytestmark = pytest.mark.distributed


@pytest.fixture
def config(tmp_path, prepared_path):
    return write_config(
        tmp_path / "config.yaml", prepared_path, checkpoint__every=2, evaluation__every=0,
        log__trackers=[],
    )  # fmt: skip


def test_full_records_name_the_file_and_where_the_run_goes_on(workers, config, tmp_path):
    assert workers(1).run(run, config, "train.steps=2") == [2]
    ((end, said),) = workers(1).run(run_with_full_records, config, "train.steps=4")
    assert end == (
        f"RunError 1: {tmp_path}/run/metrics.jsonl: No space left on device; run the same "
        f"command again to continue from {tmp_path}/run/checkpoints/step-00000002"
    )
    assert "Traceback" not in said
    assert workers(1).run(run, config, "train.steps=4") == [4]
    assert [line["step"] for line in records(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_full_tensorboard_is_named(workers, tmp_path):
    (file,) = workers(1).run(error_of_a_full_tensorboard, tmp_path / "run")
    assert file == str(tmp_path / "run" / "tensorboard")


GONE = (
    "run.folder: {}/run was removed, moved or replaced during the run, which can no longer "
    "write to it"
)


@pytest.mark.parametrize("moved", [True, False])
def test_a_folder_that_is_gone_is_noticed_at_the_next_record(workers, config, tmp_path, moved):
    ((end, _),) = workers(1).run(run_that_loses_its_folder, config, 3, moved)
    assert end == f"RunError 1: {GONE.format(tmp_path)}"
    assert not (tmp_path / "run").exists()  # no part of it comes back
    assert (tmp_path / "elsewhere" / "checkpoints" / "step-00000002").exists() == moved


@everyday("asynchronous", ["true", "false"], keep=[])
def test_all_processes_end_when_their_folder_is_gone(forks, config, tmp_path, asynchronous):
    options = ["train.steps=100000", f"checkpoint.asynchronous={asynchronous}"]
    process = forks.start(tmp_path / "logs", ["train", str(config), *options])
    records = tmp_path / "run" / "metrics.jsonl"
    process.until(lambda: records.exists() and len(records.read_bytes().splitlines()) > 4)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert process.wait(timeout=60)[0] == 1
    assert 0 not in process.wait(timeout=60)
    first = process.logs[0].read_text()
    assert f"polyad: error: {GONE.format(tmp_path)}" in first
    assert "Traceback" not in first
    assert not (tmp_path / "run").exists()


def test_a_page_that_does_not_fit_says_so(finished, monkeypatch, capfd):
    usual = Path.write_bytes

    def full(self, *given, **named):
        return usual(
            Path("/dev/full") if self.parent.name.endswith(".partial") else self, *given, **named
        )

    monkeypatch.setattr(Path, "write_bytes", full)
    assert polyad(["report", str(finished), "--tokens", "0"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        f"polyad: error: {finished}/report.html: cannot be written: No space left on device"
    )
