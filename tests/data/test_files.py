"""Temporary folders: those of killed processes are removed by the next one, others are not."""

import os
import signal
import subprocess
import sys

import pytest

from polyad.data.files import temporary_folder

HOLD = """
import sys, time
from pathlib import Path
from polyad.data.files import temporary_folder
with temporary_folder(".out.", Path(sys.argv[1]), ".partial") as folder:
    (folder / "half").write_text("half")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holding(tmp_path):
    """Starts a process that has such a folder, and gives both."""
    started = []

    def start():
        command = [sys.executable, "-c", HOLD, str(tmp_path)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1], started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_next_start_removes_what_a_killed_one_left_and_nothing_else(tmp_path, holding):
    dead, left = holding()
    _, used = holding()
    others = [
        ".out.partial",
        ".out.0123.partial",
        "out.step.partial",
        f".x{os.path.basename(left)}",
    ]
    for name in others:
        (tmp_path / name).mkdir()
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    with temporary_folder(".out.", tmp_path, ".partial") as folder:
        assert not os.path.exists(left)
        assert os.path.exists(f"{used}/half")
        assert folder.parent == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*others, os.path.basename(used)]
    )


def test_a_folder_that_was_renamed_stays(tmp_path):
    with temporary_folder(".out.", tmp_path / "new", ".partial") as folder:
        (folder / "whole").write_text("whole")
        folder.rename(tmp_path / "out")
    assert (tmp_path / "out" / "whole").read_text() == "whole"
    assert list((tmp_path / "new").iterdir()) == []


def test_a_link_with_such_a_name_is_not_followed(tmp_path, holding):
    dead, left = holding()
    dead.kill()
    dead.wait()
    (tmp_path / "precious").mkdir()
    os.rename(left, tmp_path / "moved")
    os.symlink(tmp_path / "precious", left)
    with temporary_folder(".out.", tmp_path, ".partial"):
        pass
    assert (tmp_path / "precious").is_dir()
