"""A run's folder: two real runs in one, and its lock."""

import errno
import fcntl
import functools
import os
import signal
from pathlib import Path

import pytest

from polyad.train.errors import ConfigError
from polyad.train.guard import run_folder
from polyad.train.guard.run_folder import lock_of

pytestmark = pytest.mark.distributed
RUN_CHANGES = {"train__steps": 2, "log__trackers": []}


def die_before_there_is_a_config(rank: int) -> None:
    """A kill between a file's last byte and its name."""
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target.name == "config.yaml":
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    Path.replace = killed  # type: ignore[method-assign, assignment]


def work_in_a_folder_of_its_own(hosts: Path, rank: int) -> None:
    """A host whose disk is its own sees another folder behind the same path."""
    own = hosts / f"host-{rank}"
    own.mkdir()
    os.chdir(own)
    run_folder.SEEN_WITHIN = 0.5


@pytest.mark.slow
def test_a_run_folder_that_is_another_one_on_a_host_is_refused_before_the_first_step(
    forks, config, tmp_path
):
    before = functools.partial(work_in_a_folder_of_its_own, tmp_path)
    run = forks.start(tmp_path, ["train", str(config), "run.folder=run"], before=before)
    assert run.wait() == [2, 2], run.text()
    (line,) = [line for line in run.logs[0].read_text().splitlines() if "error" in line]
    assert line.startswith("polyad: error: run.folder: run is missing or cannot be written to on ")
    assert "(rank 1)" in line
    assert not (tmp_path / "host-0" / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_a_second_run_on_the_folder_is_refused_and_the_first_goes_on(forks, config, tmp_path):
    options = ["train.steps=100000", "checkpoint.every=0", "evaluation.every=0"]
    records = tmp_path / "run" / "metrics.jsonl"

    def started():
        return forks.start(tmp_path, ["train", str(config), *options])

    def stopped(run, number):
        done = records.read_text().count("\n") if records.exists() else 0
        run.until(lambda: records.exists() and records.read_text().count("\n") > done + 1)
        run.signal(number)
        return run.wait()

    first = started()
    first.until(records.exists)
    second = started()
    assert second.wait() == [2, 2]
    assert "is in use by another start of this run" in second.text()
    assert stopped(first, signal.SIGTERM) == [143, 143]
    assert stopped(started(), signal.SIGKILL) == [137, 137]  # the kernel lets go of the lock
    assert stopped(started(), signal.SIGTERM) == [143, 143]


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_wrote_its_configuration_starts_again(
    forks, config, tmp_path
):
    killed = forks.start(tmp_path, ["train", str(config)], before=die_before_there_is_a_config)
    assert killed.wait()[0] == 137
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert any(name.startswith(".config.yaml.") for name in left)
    assert "config.yaml" not in left
    again = forks.start(tmp_path, ["train", str(config)])
    assert again.wait() == [0, 0], again.text()
    assert not list((tmp_path / "run").glob(".*.partial"))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_locks_a_file_keeps_a_second_start_out(tmp_path, monkeypatch, number):
    """As on Lustre that is mounted without `flock`; no such file system is here."""

    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_of(tmp_path):
        assert (tmp_path / ".lock.soft").exists()
        with pytest.raises(ConfigError, match="is in use by another start"):
            lock_of(tmp_path)
    with lock_of(tmp_path):
        pass
