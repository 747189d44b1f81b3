"""Real processes that encode parts, killed at any moment: the same command goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyad.data.errors import DataError
from polyad.data.text.job import Asked
from polyad.data.text.parts import PART_FILE
from polyad.data.text.prepare import Preparation, prepare
from polyad.data.text.processes import PartError

SLOWLY = """
import sys, time
from polyad.data.text.job import Asked
from polyad.data.text.writer import DatasetWriter
from polyad.data.text.prepare import Preparation
add = DatasetWriter.add
def slow(self, split, text, name, is_last=True):
    add(self, split, text, name, is_last)
    print(name, flush=True)
    time.sleep(float(sys.argv[4]))
DatasetWriter.add = slow
Preparation(Asked(source=sys.argv[1], tokenizer=sys.argv[2]), sys.argv[3], 3).all()
"""
COMMAND = """
import sys
from polyad.data.text.job import Asked
from polyad.data.text.prepare import Preparation
Preparation(Asked(source=sys.argv[1], tokenizer=sys.argv[2]), sys.argv[3], 3).all(2)
"""


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def slowly(source, tokenizer, output, seconds):
    words = [sys.executable, "-c", SLOWLY, *map(str, (source, tokenizer, output, seconds))]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
    )


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["train:300"])
def test_a_killed_command_goes_on_without_what_is_finished(tmp_path, texts, tokenizer):
    prepare(str(texts), tokenizer, tmp_path / "whole", report=lambda line: None)
    process = slowly(texts, tokenizer, tmp_path / "out", 0.02)
    encoded = [process.stdout.readline().strip() for _ in range(33)]  # of 60: in the second part
    process.send_signal(signal.SIGKILL)
    encoded += process.stdout.read().split()
    process.wait()
    folder = tmp_path / ".out.parts"
    assert (folder / "part-00000" / "part.json").is_file()
    (partial,) = folder.glob(".part-00001.partial-*")
    assert not (partial / PART_FILE).exists()
    assert not (tmp_path / "out").exists()
    first = [name for name in encoded if "from byte" not in name]
    assert 10 < len(first) < len(encoded)
    process = slowly(texts, tokenizer, tmp_path / "out", 0)
    again = process.stdout.read().splitlines()
    assert process.wait() == 0
    # Nothing of the first part, and all of the others.
    assert len(first) + len(again) == 60
    assert all("from byte" in name for name in again)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_parts_in_processes_are_the_files_of_one(tmp_path, texts, prepared_path):
    prepare(str(texts), str(prepared_path), tmp_path / "whole", report=lambda line: None)
    said = []
    request = Asked(source=str(texts), tokenizer=str(prepared_path))
    Preparation(request, tmp_path / "out", 2, report=said.append).all(2)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    (line,) = [line for line in said if line.startswith("encoding: ")]
    assert re.search(r"MB/s\), [\d,]+ tokens \([\d,]+ a second\)", line)


@pytest.mark.slow
def test_an_error_of_a_process_is_that_of_the_command(tmp_path, texts, prepared_path):
    (source := tmp_path / "source").mkdir()
    content = texts.read_text()
    (source / "a.jsonl").write_text(content + "{}\n")
    request = Asked(source=str(source), tokenizer=str(prepared_path))
    parts = Preparation(request, tmp_path / "out", 3, report=lambda line: None)
    with pytest.raises(DataError, match=r"a\.jsonl, line 61: no key 'text'"):
        parts.all(2)
    assert not (tmp_path / "out").exists()


def encoding_processes(parent):
    """Numbers of the processes that encode a part for another one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        try:
            status = (path.parent / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"polyad.data.text.processes" in words and int(status[1]) == parent:
            found.append(int(path.parent.name))
    return found


def is_running(number):
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def much_text(tmp_path, library_text):
    path = tmp_path / "much.jsonl"
    with path.open("w") as file:
        for number in range(700):
            start = number * 97 % 200_000
            file.write(json.dumps({"text": library_text[start : start + 9_000]}) + "\n")
    return path


def started(much_text, prepared_path, output):
    words = [sys.executable, "-c", COMMAND, str(much_text), str(prepared_path), str(output)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    folder = output.parent / f".{output.name}.parts"
    while len(list(folder.glob(".part-*.partial-*/train.bin"))) < 2:
        assert time.monotonic() < until
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return process, encoding_processes(process.pid)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
def test_no_process_outlives_the_command(tmp_path, much_text, prepared_path):
    for stop in (signal.SIGKILL, signal.SIGINT):
        process, others = started(much_text, prepared_path, tmp_path / "out")
        assert len(others) == 2
        process.send_signal(stop)
        process.communicate()
        until = time.monotonic() + 30
        while any(is_running(number) for number in others):
            assert time.monotonic() < until
            time.sleep(0.1)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
def test_a_killed_process_ends_the_command_which_goes_on(tmp_path, much_text, prepared_path):
    process, others = started(much_text, prepared_path, tmp_path / "out")
    os.kill(others[0], signal.SIGKILL)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert PartError.__name__ in error
    assert "was killed by signal 9; run the same command again" in error
    arguments = (str(much_text), str(prepared_path))
    prepare(*arguments, tmp_path / "whole", report=lambda line: None)
    request = Asked(source=arguments[0], tokenizer=arguments[1])
    Preparation(request, tmp_path / "out", 3, report=lambda line: None).all()
    assert files(tmp_path / "out") == files(tmp_path / "whole")
