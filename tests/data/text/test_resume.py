"""An interrupted `polyad prepare` goes on, to the files of one that was not interrupted."""

import hashlib
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import polyad.data.text.prepare
from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.resume import RESUME_FILE
from polyad.data.text.split_writer import SplitState, SplitWriter
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.writer import DatasetWriter
from tests.helpers.everyday import everyday

PREPARE_SLOWLY = """
import sys, time, polyad.data.text.prepare, polyad.data.text.writer
polyad.data.text.writer.BATCH_CHARACTERS, polyad.data.text.prepare.SAVE_SECONDS = 20_000, 0.0
add = polyad.data.text.writer.DatasetWriter.add
def slow(*given):
    add(*given)
    print("document", flush=True)
    time.sleep(0.02)
polyad.data.text.writer.DatasetWriter.add = slow
polyad.data.text.prepare.prepare(sys.argv[1], sys.argv[2], sys.argv[3])
"""
THREADS = """
import os, sys, tokenizers
from polyad.data.text.prepare import prepare
from tests.helpers.everyday import everyday
prepare(sys.argv[1], sys.argv[2], sys.argv[3], report=lambda line: None)
print(len(os.listdir("/proc/self/task")), os.environ["TOKENIZERS_PARALLELISM"])
"""


def interrupt(arguments, documents, stop=signal.SIGKILL):
    command = [sys.executable, "-c", PREPARE_SLOWLY, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for _ in range(documents):
        assert process.stdout.readline() == b"document\n"
    process.send_signal(stop)
    process.wait()
    process.stdout.close()


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture
def encoded(monkeypatch):
    """Names of the documents that are encoded."""
    names = []
    add = DatasetWriter.add

    def counted(self, split, text, name, is_last=True):
        names.append(name)
        add(self, split, text, name, is_last)

    monkeypatch.setattr(DatasetWriter, "add", counted)
    return names


@everyday("tokenizer", ["train:300", "words", None], keep=["train:300"])
def test_killed_twice_it_ends_with_the_same_files(
    tmp_path, texts, prepared_path, tokenizer, encoded
):
    arguments = (str(texts), tokenizer or str(prepared_path))
    whole = prepare(*arguments, tmp_path / "whole", report=lambda line: None)
    assert len(encoded) == 60
    out = tmp_path / "out"
    interrupt((*arguments, out), 20)
    (left,) = [path for path in tmp_path.iterdir() if ".partial-" in path.name]
    assert (left / RESUME_FILE).is_file()
    assert not out.exists()
    interrupt((*arguments, out), 15, signal.SIGINT)
    encoded.clear()
    lines = []
    manifest = prepare(*arguments, out, report=lines.append)
    behind = int(re.search(r"goes on behind (\d+) documents", lines[0])[1])
    # At document 20, and 15 later, it had saved all but the last; a signal may come a little late.
    assert 33 <= behind <= 37
    assert encoded == [f"modules.jsonl#{number}" for number in range(behind, 60)]
    assert not any("training" in line for line in lines)
    assert manifest == whole
    assert files(out) == files(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


@pytest.mark.slow
def test_another_request_begins_anew(tmp_path, texts, prepared_path, encoded):
    interrupt((texts, prepared_path, tmp_path / "out"), 10)
    silent = {"report": lambda line: None, "test_fraction": 0.2}
    prepare(str(texts), str(prepared_path), tmp_path / "out", **silent)
    assert len(encoded) == 60
    PreparedData.open(tmp_path / "out").verify()
    assert os.listdir(tmp_path) == ["out"]


@everyday(
    ("name", "missing"),
    itertools.product(["train.bin", "validation.lengths", "tokenizer.json"], [False, True]),
    keep=[("validation.lengths", False)],
)
def test_damaged_files_are_not_gone_on_from(tmp_path, texts, prepared_path, name, missing):
    arguments = (str(texts), str(prepared_path), tmp_path / "out")
    interrupt(arguments, 30)
    (left,) = tmp_path.iterdir()
    content = bytearray((left / name).read_bytes())
    content[len(content) // 3] ^= 1
    (left / name).write_bytes(content)
    if missing:
        (left / name).unlink()
    if name != "tokenizer.json":
        with pytest.raises(DataError, match="damaged since it was written"):
            prepare(*arguments, report=lambda line: None)
    prepare(*arguments, report=lambda line: None)
    again = prepare(*arguments[:2], tmp_path / "whole", report=lambda line: None)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert again.fingerprint == PreparedData.open(tmp_path / "out").manifest.fingerprint


def test_a_full_disk_keeps_what_was_saved_and_bad_text_does_not(
    tmp_path, texts, prepared_path, monkeypatch, encoded
):
    monkeypatch.setattr(polyad.data.text.prepare, "SAVE_SECONDS", 0.0)
    arguments = (str(texts), str(prepared_path), tmp_path / "out")
    counted = DatasetWriter.add

    def failing(error):
        def add(self, split, text, name, is_last=True):
            if name.endswith("#25"):
                raise error
            counted(self, split, text, name, is_last)

        return add

    for error, kept in ((OSError(28, "No space left on device"), 1), (DataError("bad"), 0)):
        monkeypatch.setattr(DatasetWriter, "add", failing(error))
        with pytest.raises(DataError, match=r"No space left|bad"):
            prepare(*arguments, report=lambda line: None)
        assert len(os.listdir(tmp_path)) == kept
    assert len(encoded) == 25  # the second call went on


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted in /proc")
def test_every_core_encodes_whatever_the_environment_says(tmp_path, texts, prepared_path):
    command = [sys.executable, "-c", THREADS, str(texts), str(prepared_path), str(tmp_path / "out")]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "23"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    threads, after = done.stdout.split()
    assert int(threads) >= 23
    assert after == "false"


def test_a_missing_file_of_an_empty_split_is_damage(tmp_path, prepared_path):
    nothing = hashlib.sha256().hexdigest()
    state = SplitState(
        documents=0, tokens=0, words=0, bytes=0, sha256=nothing, lengths_sha256=nothing
    )
    with pytest.raises(DataError, match=r"test\.bin: damaged .*begins from the start"):
        SplitWriter(tmp_path / "test", load_tokenizer(prepared_path), state)
