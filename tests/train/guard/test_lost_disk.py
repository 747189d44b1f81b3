"""A disk that is full, and a run's folder that is gone: one line, and where the run goes on."""

import resource
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from polyad.train.loop.metrics import Metrics, TensorBoard
from tests.helpers.runs import QUIET, ended, records, run

pytestmark = pytest.mark.distributed


def run_with_full_records(config: Path, *overrides: str) -> tuple[str, str]:
    """`polyad train` where `metrics.jsonl` takes no byte: how it ends, and what it says."""
    usual = Path.open

    def opened(self: Path, *given: Any, **named: Any) -> Any:
        full = self.name == "metrics.jsonl" and given[:1] == ("a",)
        return usual(Path("/dev/full") if full else self, *given, **named)

    with mock.patch.object(Path, "open", opened):
        return ended(config, *overrides)


def error_of_a_full_tensorboard(folder: Path) -> str | None:
    """The file that an error names where the kernel refuses long files."""
    folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensorboard = TensorBoard(folder, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        for step in range(10_000):
            tensorboard.log(step, {"loss": 1.0}, {})
        tensorboard.close()
    except OSError as error:
        filename: str | None = error.filename
        return filename
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return None


def run_that_loses_its_folder(
    config: Path, step: int, moved: bool, *overrides: str
) -> tuple[str, str]:
    """`polyad train` whose folder is removed, or moved, by the main process after a step."""
    write = Metrics.write

    def then_gone(self: Metrics, record: dict[str, Any]) -> None:
        if record["step"] == step:
            go = self._folder
            if moved:
                go.rename(go.with_name("elsewhere"))
            else:
                shutil.rmtree(go)
        write(self, record)

    with mock.patch.object(Metrics, "write", then_gone):
        return ended(config, *overrides)


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
