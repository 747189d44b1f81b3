"""A `polyad prepare` that was stopped goes on, to the files of one that was not."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import polyad.data.text.prepare
from polyad.data.errors import DataError
from polyad.data.prepared import alone
from polyad.data.text.dataset import PreparedData
from polyad.data.text.parts import PART_FILE, Finished
from polyad.data.text.plan import PLAN_FILE
from polyad.data.text.prepare import prepare
from polyad.data.text.writer import DatasetWriter
from tests.helpers.everyday import everyday

PARTS = 6
PREPARE_SLOWLY = """
import sys, time, polyad.data.text.prepare
from polyad.data.text.writer import DatasetWriter
polyad.data.text.prepare.TEXT_OF_A_PART = int(sys.argv[4])
add = DatasetWriter.add
def slow(*given):
    add(*given)
    print("document", flush=True)
    time.sleep(0.02)
DatasetWriter.add = slow
polyad.data.text.prepare.prepare(*sys.argv[1:4])
"""
THREADS = """
import os, sys, tokenizers
from polyad.data.text.prepare import prepare
prepare(sys.argv[1], sys.argv[2], sys.argv[3], report=lambda line: None)
print(len(os.listdir("/proc/self/task")), os.environ["TOKENIZERS_PARALLELISM"])
"""


def interrupt(arguments, documents, stop=signal.SIGKILL):
    size = polyad.data.text.prepare.TEXT_OF_A_PART
    command = [sys.executable, "-c", PREPARE_SLOWLY, *map(str, arguments), str(size)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for _ in range(documents):
        assert process.stdout.readline() == b"document\n"
    process.send_signal(stop)
    process.wait()
    process.stdout.close()


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def finished(folder):
    """Documents of each part that is there."""
    found = [path.read_text() for path in sorted(folder.glob(f"part-*/{PART_FILE}"))]
    return [Finished.model_validate_json(text).documents for text in found]


@pytest.fixture(autouse=True)
def several_parts(texts, monkeypatch):
    size = -(-texts.stat().st_size // PARTS)
    monkeypatch.setattr(polyad.data.text.prepare, "TEXT_OF_A_PART", size)


@pytest.fixture
def encoded(monkeypatch):
    """Texts of the documents that are encoded."""
    found = []
    add = DatasetWriter.add

    def counted(self, split, text, name, is_last=True):
        found.append(text)
        add(self, split, text, name, is_last)

    monkeypatch.setattr(DatasetWriter, "add", counted)
    return found


@everyday("tokenizer", ["train:300", "words", None], keep=[])
def test_killed_twice_it_ends_with_the_same_files(
    tmp_path, texts, prepared_path, tokenizer, encoded
):
    arguments = (str(texts), tokenizer or str(prepared_path))
    whole = prepare(*arguments, tmp_path / "whole", report=lambda line: None)
    assert len(encoded) == 60
    out, place = tmp_path / "out", tmp_path / ".out.partial"
    interrupt((*arguments, out), 20)
    assert not out.exists()
    first = finished(place)
    assert 1 <= len(first) < PARTS
    interrupt((*arguments, out), 15, signal.SIGINT)
    done = finished(place)
    assert len(first) <= len(done) < PARTS
    assert done[: len(first)] == first
    before, lines = list(encoded), []
    encoded.clear()
    manifest = prepare(*arguments, out, report=lines.append)
    assert lines[0] == f"{place}: {len(done)} of {PARTS} parts already exist"
    assert encoded == before[sum(done) :]
    assert not any("training" in line for line in lines)
    assert manifest == whole
    assert files(out) == files(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_what_a_killed_one_left_of_a_part_is_removed(tmp_path, texts, prepared_path):
    arguments = (texts, prepared_path, tmp_path / "out")
    for _ in range(2):
        interrupt(arguments, 3)
        left = list((tmp_path / ".out.partial").glob(".part-00000.partial-*"))
        assert len(left) == 1
    prepare(*map(str, arguments), report=lambda line: None)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.slow
def test_another_request_begins_anew(tmp_path, texts, prepared_path, encoded):
    interrupt((texts, prepared_path, tmp_path / "out"), 20)
    assert finished(tmp_path / ".out.partial")
    silent = {"report": lambda line: None, "test_fraction": 0.2}
    prepare(str(texts), str(prepared_path), tmp_path / "out", **silent)
    assert len(encoded) == 60
    PreparedData.open(tmp_path / "out").verify()
    assert os.listdir(tmp_path) == ["out"]


@everyday(
    ("name", "missing"),
    itertools.product(
        ["train.bin", "train.documents", PART_FILE, "../tokenizer.json", f"../{PLAN_FILE}"],
        [False, True],
    ),
    keep=[("train.bin", False)],
)
def test_damaged_files_are_not_gone_on_from(tmp_path, texts, prepared_path, name, missing):
    arguments = (str(texts), str(prepared_path), tmp_path / "out")
    interrupt(arguments, 30)
    path = tmp_path / ".out.partial" / "part-00000" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    if missing:
        path.unlink()
    if not name.startswith(".."):
        with pytest.raises(
            DataError, match=r"damaged: .*; run the same command again to start over"
        ):
            prepare(*arguments, report=lambda line: None)
        assert os.listdir(tmp_path) == []
    prepare(*arguments, report=lambda line: None)
    again = prepare(*arguments[:2], tmp_path / "whole", report=lambda line: None)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert again.fingerprint == PreparedData.open(tmp_path / "out").manifest.fingerprint


def test_a_full_disk_keeps_what_is_finished_and_bad_text_does_not(
    tmp_path, texts, prepared_path, monkeypatch, encoded
):
    arguments = (str(texts), str(prepared_path), tmp_path / "out")
    prepare(*arguments[:2], tmp_path / "whole", report=lambda line: None)
    bad = encoded[25]
    encoded.clear()
    counted = DatasetWriter.add

    def failing(error):
        def add(self, split, text, name, is_last=True):
            if text == bad:
                raise error
            counted(self, split, text, name, is_last)

        return add

    done = []
    for error, kept in ((OSError(28, "No space left on device"), 1), (DataError("bad"), 0)):
        monkeypatch.setattr(DatasetWriter, "add", failing(error))
        with pytest.raises(DataError, match=r"out: cannot be written: No space left|^bad$"):
            prepare(*arguments, report=lambda line: None)
        assert len(list(tmp_path.glob(".out.partial"))) == kept
        done.append(sum(finished(tmp_path / ".out.partial")))
    assert done[0] > 0
    assert len(encoded) == 25 + 25 - done[0]  # the second call went on


def test_a_process_that_prepares_the_same_is_waited_for(tmp_path, texts, prepared_path, encoded):
    arguments = (str(texts), str(prepared_path), tmp_path / "out")
    said, waits, found = [], threading.Event(), []

    def heard(line):
        said.append(line)
        if "waiting for another process" in line:
            waits.set()

    second = threading.Thread(target=lambda: found.append(prepare(*arguments, report=heard)))
    with alone(tmp_path / ".out.partial") as ours:
        assert ours
        second.start()
        assert waits.wait(60)
        first = prepare(*arguments[:2], tmp_path / "first", report=lambda line: None)
        (tmp_path / "first").rename(tmp_path / "out")
    second.join(60)
    assert found == [first]
    assert len(encoded) == 60
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted in /proc")
def test_every_core_encodes_whatever_the_environment_says(tmp_path, texts, prepared_path):
    command = [sys.executable, "-c", THREADS, str(texts), str(prepared_path), str(tmp_path / "out")]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "23"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    threads, after = done.stdout.split()
    assert int(threads) >= 23
    assert after == "false"
