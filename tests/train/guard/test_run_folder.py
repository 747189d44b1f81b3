"""A run's folder: two real runs in one; whether the disk has room for the checkpoints to come."""

import functools
import os
import shutil
import signal
from pathlib import Path

import pytest

from polyad.parallel import meeting
from polyad.parallel.config import CheckpointConfig
from polyad.train.errors import ConfigError
from polyad.train.guard import run_folder
from polyad.train.guard.run_folder import check_room
from tests.helpers.runs import write_config

pytestmark = pytest.mark.distributed


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
    meeting.LINGER = 1.0


@pytest.mark.slow
def test_a_run_folder_that_is_another_one_on_a_host_is_refused_before_the_first_step(
    forks, tmp_path, prepared_path
):
    path = write_config(tmp_path / "config.yaml", prepared_path, run__folder="run")
    before = functools.partial(work_in_a_folder_of_its_own, tmp_path)
    run = forks.start(tmp_path, ["train", str(path)], before=before)
    assert run.wait() == [2, 2], run.text()
    (line,) = [line for line in run.logs[0].read_text().splitlines() if "error" in line]
    assert line.startswith("polyad: error: run.folder: run: on ")
    assert "(rank 1) it is another folder than the one that" in line
    assert not (tmp_path / "host-0" / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_a_second_run_on_the_folder_is_refused_and_the_first_goes_on(
    forks, tmp_path, prepared_path
):
    config = write_config(tmp_path / "config.yaml", prepared_path, log__trackers=[])
    options = ["train.steps=100000", "checkpoint.every=0", "evaluation.every=0"]
    first = forks.start(tmp_path, ["train", str(config), *options])
    records = tmp_path / "run" / "metrics.jsonl"
    first.until(lambda: records.exists() and records.read_text().count("\n") >= 2)
    second = forks.start(tmp_path, ["train", str(config), *options])
    assert second.wait() == [2, 2]
    assert "is in use by another start of this run" in second.text()
    done = records.read_text().count("\n")
    first.until(lambda: records.read_text().count("\n") > done)
    first.signal(signal.SIGTERM)
    assert first.wait() == [143, 143]
    third = forks.start(tmp_path, ["train", str(config), *options])
    third.until(lambda: "step" in third.text())
    third.signal(signal.SIGKILL)  # the kernel lets go of the lock
    assert third.wait() == [137, 137]
    fourth = forks.start(tmp_path, ["train", str(config), *options])
    fourth.until(lambda: "step" in fourth.text())
    fourth.signal(signal.SIGTERM)
    assert fourth.wait() == [143, 143]


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_wrote_its_configuration_starts_again(
    forks, tmp_path, prepared_path
):
    config = write_config(tmp_path / "config.yaml", prepared_path, train__steps=2, log__trackers=[])
    killed = forks.start(tmp_path, ["train", str(config)], before=die_before_there_is_a_config)
    assert killed.wait()[0] == 137
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert any(name.startswith(".config.yaml.") for name in left)
    assert "config.yaml" not in left
    again = forks.start(tmp_path, ["train", str(config)])
    assert again.wait() == [0, 0], again.text()
    assert not list((tmp_path / "run").glob(".*.partial"))


SIZE = 1_000


@pytest.mark.parametrize(
    ("keys", "free", "said"),
    [
        # 10 are to come, and all stay.
        ({}, 10, None),
        ({}, 9, "10 checkpoints of 1 KB will be kept, but only 9 KB are free"),
        ({"keep_last": 1}, 2, None),
        # Of steps 100, 200, ..., 1,000 those of 200, 400, ... stay for ever.
        ({"keep_last": 1, "keep_every": 200}, 5, None),
        ({"keep_last": 1, "keep_every": 200}, 4, "5 checkpoints"),
        ({"keep_last": 1, "keep_every": 150}, 2, "3 checkpoints"),  # 300, 600, 900
    ],
)
def test_what_stays_for_ever_is_counted(tmp_path, monkeypatch, capsys, keys, free, said):
    usage = shutil.disk_usage(tmp_path)._replace(free=free * SIZE)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    wanted = CheckpointConfig(every=100, **keys)
    check_room(tmp_path / "run", wanted, step=0, steps=1000, size=SIZE)
    printed = capsys.readouterr().err
    assert (said in printed) if said else not printed


def test_the_next_ones_have_to_fit(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=SIZE)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    wanted = CheckpointConfig(every=100, keep_last=1)
    with pytest.raises(ConfigError, match="2 more checkpoints of 1 KB must fit, "):
        check_room(tmp_path / "run", wanted, step=0, steps=1000, size=SIZE)


def test_room_that_is_made_in_time_is_enough(tmp_path, monkeypatch, capsys):
    """A run that goes on after its disk became full waits for who removes what filled it."""
    filler = tmp_path / "filler"
    filler.touch()
    usual = shutil.disk_usage(tmp_path)
    looked = []

    def usage(place: Path) -> tuple[int, int, int]:
        looked.append(place)
        if len(looked) == 3:
            filler.unlink()
        return usual._replace(free=0 if filler.exists() else usual.free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(run_folder, "LOOKS_FOR_ROOM", 0.01)
    wanted = CheckpointConfig(every=100, keep_last=1)
    asked = functools.partial(check_room, tmp_path / "run", wanted, step=0, steps=1000, size=SIZE)
    asked(patience=60)
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("polyad: waiting up to 60 s: run.folder: ") for line in said] == [True]
    filler.touch()
    with pytest.raises(ConfigError, match="2 more checkpoints of 1 KB must fit, "):
        asked(patience=0.05)
