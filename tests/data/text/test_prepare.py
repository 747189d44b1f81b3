import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from polyad.data.errors import DataError
from polyad.data.tables import SPLITS
from polyad.data.text.dataset import PreparedData, TokenStream, index_bytes, token_dtype
from polyad.data.text.manifest import MANIFEST_FILE, Manifest
from polyad.data.text.prepare import prepare, split_by_bytes
from polyad.data.text.tokenizers.files import train_tokenizer
from polyad.launch.commands.data import prepared_table
from tests.helpers.prepared import jsonl, open_source
from tests.helpers.refusals import line_of

PREPARE_SLOWLY = """
import sys, time, polyad.data.text.writer
from polyad.data.text.prepare import prepare
polyad.data.text.writer.BATCH_CHARACTERS = 1000
add = polyad.data.text.writer.SplitWriter.add
def slow(*given, **named):
    add(*given, **named)
    print("document", flush=True)
    time.sleep(0.2)
polyad.data.text.writer.SplitWriter.add = slow
prepare(sys.argv[1], sys.argv[2], sys.argv[3])
"""
# Not getrusage: a child's ru_maxrss begins at what its parent held.
PEAK = """
import re, sys
from pathlib import Path
from polyad.data.text.prepare import prepare
prepare(sys.argv[1], sys.argv[2], sys.argv[3])
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024)
"""


def test_tokens_are_the_documents_with_their_ends(texts, tmp_path):
    prepare(str(texts), "train:400", tmp_path / "modules")
    prepared = PreparedData.open(tmp_path / "modules")
    dealt_texts = {name: [] for name in SPLITS}
    documents = open_source(str(texts)).documents()
    for split, document in split_by_bytes(documents, {"validation": 0.05, "test": 0.05}):
        dealt_texts[split].append(document.text)
    tokenizer = prepared.tokenizer()
    # The tokenizer has seen the train split alone.
    assert tokenizer.fingerprint == train_tokenizer(iter(dealt_texts["train"]), 400).fingerprint
    for name in SPLITS:
        info, stream = prepared.manifest.splits[name], prepared.split(name)
        assert info.documents == len(dealt_texts[name]) > 0
        assert info.words == sum(len(text.split()) for text in dealt_texts[name])
        assert info.bytes == sum(len(text.encode()) for text in dealt_texts[name])
        assert info.tokens == stream.num_tokens == stream.document_lengths.sum()
        for number, text in enumerate(dealt_texts[name]):
            ids = stream.read_document(number).tolist()
            assert ids == [*tokenizer.encode(text), tokenizer.end_of_text_id]


def test_megatron_reads_the_files(prepared):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prepared.path / "train"))
    stream = prepared.split("train")
    assert len(dataset) == stream.num_documents
    np.testing.assert_array_equal(dataset.document_indices, np.arange(len(dataset) + 1))
    np.testing.assert_array_equal(dataset[3], stream.read_document(3))


def test_the_name_of_a_file_may_be_any_bytes(tmp_path):
    jsonl(tmp_path / "\udcff.jsonl", ["a b"] * 20)
    assert prepare(str(tmp_path), "train:300", tmp_path / "out").splits["train"].documents == 18


def test_prepared_data_is_replaced_only_if_that_is_asked_for(tmp_path):
    source, out = jsonl(tmp_path / "a.jsonl", ["a b"] * 5), tmp_path / "out"
    first = prepare(source, "train:300", out)
    jsonl(tmp_path / "a.jsonl", ["a c"] * 6)
    with pytest.raises(DataError, match="--overwrite"):
        prepare(source, "train:300", out)
    assert PreparedData.open(out).manifest == first
    second = prepare(source, "train:300", out, overwrite=True)
    assert second.fingerprint != first.fingerprint
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "out"]


@pytest.mark.parametrize("name", ["manifest.json", "thesis.txt"])
def test_what_came_while_it_worked_is_not_replaced(tmp_path, monkeypatch, name):
    source, out = jsonl(tmp_path / "a.jsonl", ["a b"] * 5), tmp_path / "out"

    write = Manifest.write

    def meanwhile(manifest, folder):
        write(manifest, folder)
        out.mkdir()
        (out / name).write_text("precious")

    monkeypatch.setattr(Manifest, "write", meanwhile)
    with pytest.raises(DataError, match="--overwrite"):
        prepare(source, "train:300", out)
    assert [path.name for path in out.iterdir()] == [name]
    assert (out / name).read_text() == "precious"


def test_foreign_content_is_never_replaced(tmp_path):
    source, out = jsonl(tmp_path / "a.jsonl", ["a b"] * 5), tmp_path / "out"
    prepare(source, "train:300", out)
    (out / "notes.txt").write_text("mine")
    for path in (out, tmp_path):
        with pytest.raises(DataError, match="nothing was changed"):
            prepare(source, "train:301", path, overwrite=True)
    with pytest.raises(DataError, match="nothing was changed"):
        prepare(source, "train:301", source, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "no text"), ('{"text": ""}\n', "no text"), ('{"text": "a"}\n' * 50 + "{\n", "line 51")],
)
def test_nothing_to_read_or_a_bad_line_leaves_nothing(tmp_path, prepared_path, content, words):
    (tmp_path / "a.jsonl").write_text(content)
    for tokenizer in ("train:300", str(prepared_path)):
        with pytest.raises(DataError, match=words):
            prepare(str(tmp_path / "a.jsonl"), tokenizer, tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_prepare_leaves_nothing_complete(tmp_path, texts, prepared_path, stop):
    out = tmp_path / "out"
    arguments = [str(texts), str(prepared_path), str(out)]
    command = [sys.executable, "-c", PREPARE_SLOWLY, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for _ in range(5):
        assert process.stdout.readline() == b"document\n"
    process.send_signal(stop)
    process.wait()
    process.stdout.close()
    assert not out.exists()
    left = os.listdir(tmp_path)
    assert bool(left) == (stop == signal.SIGKILL)
    for name in left:
        assert not (tmp_path / name / MANIFEST_FILE).exists()
    prepare(*arguments)
    PreparedData.open(out).verify()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read in /proc")
@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path, library_text, prepared_path):
    peaks = {}
    for copies in (5, 25):  # about 5 MB and 23 MB
        path, size = tmp_path / f"{copies}.jsonl", 5000
        pieces = [library_text[i : i + size] for i in range(0, len(library_text), size)]
        jsonl(path, pieces * copies)
        command = [
            sys.executable,
            "-c",
            PEAK,
            str(path),
            str(prepared_path),
            str(tmp_path / path.stem),
        ]
        peaks[copies] = float(subprocess.run(command, capture_output=True, check=True).stdout)
    assert peaks[25] < peaks[5] + 12, peaks  # MB


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, texts, prepared_path, monkeypatch):
    def full(self, ids, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polyad.data.text.writer.SplitWriter.add", full)
    with pytest.raises(DataError, match=r"out: cannot be written: No space left"):
        prepare(str(texts), str(prepared_path), tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_files_of_megatron_s_builder_are_read_as_it_writes_them(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    documents = [[1, 2, 3], [4], [5, 6]]
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for tokens in documents:
        builder.add_document(np.array(tokens), [len(tokens)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert TokenStream(tmp_path / "theirs", 6, 3, 7).document_lengths.tolist() == [3, 1, 2]
    assert (tmp_path / "theirs.idx").stat().st_size == index_bytes(3)
    for size in (400, 65_499, 65_500, 300_000):
        assert token_dtype(size) == DType.optimal_dtype(size)


@pytest.mark.parametrize(
    ("source", "options", "key"),
    [
        ("a.jsonl", {"documents": "words"}, "--documents"),
        ("a.jsonl", {"file_format": "csv"}, "--format"),
        ("", {}, "--source"),
        ("\udcff", {}, "--source"),
        ("a.txt", {"tokenizer": ""}, "--tokenizer"),
        ("a.txt", {"output": ""}, "path"),
        ("a.txt", {"end_of_text": "\udcff"}, "--end-of-text"),
        ("a.txt", {"test_source": ""}, "--test-source"),
        ("a.txt", {"validation_fraction": -0.1}, "--validation-fraction"),
        ("a.txt", {"test_fraction": 0.6}, "--test-fraction"),
        ("a.txt", {"test_source": "a.jsonl", "test_fraction": 0.1}, "--test-fraction"),
        *(("a.jsonl", {"part": part}, "--part") for part in ("0/4", "5/4", "1", "1/0", "a/b", "")),
        ("a.jsonl", {"part": "1/2"}, "--part"),  # with a tokenizer to train
    ],
)
def test_a_bad_option_is_named(tmp_path, monkeypatch, source, options, key):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "a b"}\n' * 40)
    before = sorted(os.listdir(tmp_path))
    given = {"source": source, "tokenizer": "train:300", "output": "out"} | options
    assert key in line_of(DataError, prepare, **given)
    assert sorted(os.listdir(tmp_path)) == before


def test_what_stands_beside_texts_is_counted_and_told(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for number in range(40):
        (folder / f"{number:02}.{'TXT' if number % 2 else 'txt'}").write_text(f"{number} text.\n")
    for name in ("README.md", "LICENSE", "deep/PAGES.HTML", "book.txt.gz", ".gitignore"):
        (folder / name).write_text("x")
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX" / "00.txt").write_text("no text")
    manifest = prepare(str(folder), "train:300", tmp_path / "out")
    assert manifest.left_out == {"hidden files and folders": 2, "files of other kinds": 4}
    assert sum(split.documents for split in manifest.splits.values()) == 40
    table = prepared_table(manifest, "out", 1.0)
    assert "too few words for a vocabulary of 300" in table
    assert "left out: " in table
    assert "files of other kinds: 4" in table


def documents(folder, split):
    stream = PreparedData.open(folder).split(split)
    return [stream.read_document(number).tolist() for number in range(stream.num_documents)]


@pytest.fixture
def play(tmp_path, library_text):
    """1.3 MB in one file."""
    path = tmp_path / "play.txt"
    path.write_text((library_text * 5)[:1_300_000])
    return path


def test_a_text_file_is_one_document_in_each_split_by_position(tmp_path, play, prepared_path):
    manifest = prepare(str(play), str(prepared_path), tmp_path / "out")
    assert manifest.split_by == "position"
    assert [manifest.splits[name].documents for name in SPLITS] == [1, 1, 1]
    size = play.stat().st_size
    for name, share in zip(SPLITS, (0.9, 0.05, 0.05), strict=True):
        assert abs(manifest.splits[name].bytes - share * size) < 500
    # End to end the splits are the file, and each has the tokens of its text as a whole.
    data = PreparedData.open(tmp_path / "out")
    tokenizer, text, end = data.tokenizer(), play.read_text(), 0
    for name in SPLITS:
        (ids,) = documents(tmp_path / "out", name)
        part = tokenizer.decode(ids[:-1])
        assert text.startswith(part, end)
        end += len(part)
        assert ids == [*tokenizer.encode(part), tokenizer.end_of_text_id]
        assert part.endswith("\n") or end == len(text)
    assert end == len(text)
    data.verify()
    assert Manifest.read(tmp_path / "out") == manifest


def test_many_text_files_are_dealt_out_and_few_are_not(tmp_path, prepared_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.md").write_text("some words\n" * 50)
    options = {"file_format": "text", "overwrite": True}
    out = tmp_path / "out"
    manifest = prepare(str(folder), str(prepared_path), out, **options)
    assert (manifest.split_by, manifest.request.file_format) == ("documents", "text")
    assert [manifest.splits[name].documents for name in SPLITS] == [18, 1, 1]
    (folder / "19.md").unlink()
    manifest = prepare(str(folder), str(prepared_path), out, **options)
    assert manifest.split_by == "position"
    assert sum(split.bytes for split in manifest.splits.values()) == 19 * 550
    assert [manifest.splits[name].documents for name in SPLITS] == [18, 2, 1]
    # With splits of its own nothing is held out of it.
    manifest = prepare(
        str(folder), str(prepared_path), out, validation_source=str(folder / "00.md"),
        test_fraction=0.0, **options,
    )  # fmt: skip
    assert manifest.split_by == "documents"
    assert [manifest.splits[name].documents for name in SPLITS] == [19, 1, 0]
