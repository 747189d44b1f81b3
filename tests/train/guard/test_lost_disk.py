"""A disk that is full, and a run's folder that is gone: one line, and where the run goes on."""

from pathlib import Path

import pytest

from tests.helpers.lost_disk import (
    error_of_a_full_tensorboard,
    run_that_loses_its_folder,
    run_with_full_records,
)
from tests.helpers.runs import QUIET, records, run

pytestmark = pytest.mark.distributed


RUN_CHANGES = QUIET | {"checkpoint__every": 2}


def test_full_records_name_the_file_and_where_the_run_goes_on(workers, config, tmp_path):
    assert workers(1).run(run, config, "train.steps=2") == [2]
    ((end, said),) = workers(1).run(run_with_full_records, config, "train.steps=4")
    assert end.startswith(f"RunError 1: {tmp_path}/run/metrics.jsonl: No space left on device; ")
    assert end.endswith(f"continue from {tmp_path}/run/checkpoints/step-00000002")
    assert "Traceback" not in said
    assert workers(1).run(run, config, "train.steps=4") == [4]
    assert [line["step"] for line in records(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_full_tensorboard_is_named(workers, tmp_path):
    (file,) = workers(1).run(error_of_a_full_tensorboard, tmp_path / "run")
    assert file == str(tmp_path / "run" / "tensorboard")


@pytest.mark.parametrize("moved", [True, False])
def test_a_folder_that_is_gone_is_noticed_at_the_next_record(workers, config, tmp_path, moved):
    ((end, _),) = workers(1).run(run_that_loses_its_folder, config, 3, moved)
    assert end.startswith(f"RunError 1: run.folder: {tmp_path}/run was removed, moved or replaced")
    assert not (tmp_path / "run").exists()  # no part of it comes back
    assert (tmp_path / "elsewhere" / "checkpoints" / "step-00000002").exists() == moved


@pytest.mark.slow
def test_all_processes_end_when_their_folder_is_gone(forks, config, tmp_path):
    process = forks.start(tmp_path / "logs", ["train", str(config), "train.steps=100000"])
    records = tmp_path / "run" / "metrics.jsonl"
    process.until(lambda: records.exists() and len(records.read_bytes().splitlines()) > 4)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    first, second = process.wait(timeout=60)
    assert (first, second != 0) == (1, True)
    assert "Traceback" not in process.logs[0].read_text()


def test_a_page_that_does_not_fit_says_so(finished, monkeypatch, refused):
    usual = Path.write_bytes

    def full(self, *given):
        return usual(Path("/dev/full") if self.parent.name.endswith(".partial") else self, *given)

    monkeypatch.setattr(Path, "write_bytes", full)
    line = refused("report", finished, "--tokens", "0")
    assert f"{finished}/report.html: " in line
    assert line.endswith("No space left on device")
