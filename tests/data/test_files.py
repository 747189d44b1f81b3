"""Files and folders that appear whole: what killed processes left is removed by the next one."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polyad.data.files import temporary_folder, whole_file, write_whole

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


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from polyad.data.files import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole(Path(sys.argv[1]), "x" * 1001)
except OSError as error:
    print(error.filename)
"""


def test_two_writers_of_one_file_both_write_it_whole(tmp_path):
    path = tmp_path / "out"
    with whole_file(path) as first:
        first.write_text("the first")
        with whole_file(path) as second:
            second.write_text("the second")
        assert path.read_text() == "the second"
    assert path.read_text() == "the first"
    assert list(tmp_path.iterdir()) == [path]


def _use_folders(parent):
    for _ in range(200):
        with temporary_folder(".out.", parent, ".partial") as folder:
            (folder / "file").touch()


def test_processes_that_begin_at_once_keep_their_folders(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_use_folders, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    command = [sys.executable, "-c", FULL_DISK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_pipes_and_permissions_stay(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    write_whole(Path("/dev/null"), "nothing")
    assert not Path("/dev/null").is_file()
