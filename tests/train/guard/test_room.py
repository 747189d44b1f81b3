"""Whether the disk has room for the checkpoints to come."""

import shutil

import pytest

from polyad.parallel.config import CheckpointConfig
from polyad.train.errors import ConfigError
from polyad.train.guard.room import check_room

SIZE = 1_000


@pytest.mark.parametrize(
    ("keys", "free", "said"),
    [
        # 10 are to come, and all stay.
        ({}, 10, None),
        ({}, 9, "10 checkpoints of 1 KB are to come and 9 KB are free"),
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
