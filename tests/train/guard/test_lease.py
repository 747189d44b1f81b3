"""A lease on a file system without locks."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from unittest import mock

import pytest

from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.guard.lease import Lease, LeaseTaken
from polyad.train.guard.run_folder import LEASE_FILE, RunLock

ROOT = Path(__file__).resolve().parents[3]
HOLD = """
import sys, time
from pathlib import Path
from polyad.train.guard.lease import Lease
lease = Lease(Path(sys.argv[1]), seconds=float(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


def holder(path: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(path), str(seconds)]
    started = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "held\n"
    return started


@pytest.fixture
def path(tmp_path):
    return tmp_path / LEASE_FILE


def test_one_has_it_until_it_gives_it_back(path):
    first = Lease(path)
    with pytest.raises(LeaseTaken, match=rf"process {os.getpid()} on .* renewed \.lease 0 s ago"):
        Lease(path)
    first.release()
    assert not list(path.parent.iterdir())
    second = Lease(path)
    first.release()  # not its own any more
    assert path.exists()
    second.release()


def test_of_a_process_that_was_killed_it_is_free_at_once(path):
    other = holder(path, 1000)
    with pytest.raises(LeaseTaken, match=f"process {other.pid} on"):
        Lease(path)
    other.kill()
    other.wait()
    Lease(path).release()


def test_of_another_host_it_is_free_when_it_is_not_renewed(path):
    path.write_text(json.dumps({"token": "a", "host": "elsewhere", "process": 1}))
    with pytest.raises(LeaseTaken, match="process 1 on elsewhere"):
        Lease(path, seconds=30)
    os.utime(path, (0, path.stat().st_mtime - 31))
    Lease(path, seconds=30).release()


def test_it_is_renewed(path):
    lease = Lease(path, seconds=1.2)
    before = path.stat().st_mtime
    time.sleep(2)
    assert path.stat().st_mtime - before > 1
    lease.release()


def test_a_process_that_was_frozen_for_longer_ends(path):
    other = holder(path, 1.0)
    other.send_signal(signal.SIGSTOP)
    # As if it were on another host, whose processes nobody can ask for.
    told = json.loads(path.read_text())
    before = path.stat()
    path.write_text(json.dumps(told | {"host": "elsewhere"}))
    os.utime(path, (before.st_atime, before.st_mtime))
    for _ in range(50):
        try:
            lease = Lease(path, seconds=1.0)
            break
        except LeaseTaken:
            time.sleep(0.1)
    other.send_signal(signal.SIGCONT)
    assert other.wait(timeout=20) == 1
    assert other.stderr is not None
    assert "lost its folder" in other.stderr.read()
    assert json.loads(path.read_text())["host"] == socket.gethostname()
    lease.release()


def test_one_whose_file_is_gone_is_told(path):
    told = Event()
    lease = Lease(path, told.set, seconds=0.6)
    path.unlink()
    assert told.wait(10)
    lease.release()


def test_many_that_find_an_old_lease_do_not_all_get_it(path):
    path.write_text(json.dumps({"token": "a", "host": "elsewhere", "process": 1}))
    os.utime(path, (0, 0))
    script = HOLD.replace("time.sleep(60)", "time.sleep(3)")
    command = [sys.executable, "-c", script, str(path), "30"]
    started = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in started]
    assert outputs.count(b"held\n") == 1


def test_one_that_was_slow_to_take_an_old_lease_leaves_a_new_one(path):
    path.write_text(json.dumps({"token": "a", "host": "elsewhere", "process": 1}))
    os.utime(path, (0, 0))
    quick: list[Lease] = []
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        if not quick:  # between another's judgement and its move
            quick.append(None)  # type: ignore[arg-type]
            path.unlink()
            quick[0] = Lease(path)
        return rename(self, target)

    with mock.patch.object(Path, "rename", late), pytest.raises(LeaseTaken, match="renewed"):
        Lease(path)
    assert len(list(path.parent.iterdir())) == 1
    quick[0].release()
    assert not path.exists()


@pytest.mark.distributed
def test_a_folder_without_locks_is_leased(tmp_path):
    world = comm.initialize()
    no_locks = OSError(errno.ENOSYS, "Function not implemented")
    with mock.patch.object(fcntl, "flock", side_effect=no_locks):
        lock = RunLock(tmp_path / "run", world)
        with pytest.raises(ConfigError, match=r"is in use by another start .*: process"):
            RunLock(tmp_path / "run", world)
        lock.release()
        RunLock(tmp_path / "run", world).release()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
