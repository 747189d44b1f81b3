"""Parts of a text, joined: together they hold the documents of the whole, with its tokens."""

import gzip
import json
import shutil

import pytest

from polyad.data.errors import DataError
from polyad.data.tables import SPLITS
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import join, part_folder, prepare
from tests.helpers.everyday import everyday
from tests.helpers.prepared import flip, jsonl


@pytest.fixture
def documents(library_text):
    """Some real text, in documents of very different lengths, two of them empty."""
    lines = library_text.splitlines(keepends=True)[:900]
    found, at = [], 0
    for number in range(43):
        size = 1 + (number * 7) % 31
        found.append("".join(lines[at : at + size]))
        at += size
    found[5] = found[41] = ""
    return found


def one_file(folder, documents):
    jsonl(folder / "a.jsonl", documents)
    return str(folder)


def compressed_files(folder, documents):
    for number in range(5):
        lines = [json.dumps({"text": text}) + "\n" for text in documents[number::5]]
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return str(folder)


def saved(folder, documents):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": documents}).save_to_disk(str(folder))
    return str(folder)


def tokens(folder):
    data = PreparedData.open(folder)
    streams = [data.split(name) for name in SPLITS]
    return sorted(
        tuple(stream.read_document(number).tolist())
        for stream in streams
        for number in range(stream.num_documents)
    )


@everyday("kind", [one_file, compressed_files, saved], keep=[one_file, saved])
def test_joined_parts_hold_the_documents_of_the_whole(tmp_path, documents, prepared_path, kind):
    (tmp_path / "text").mkdir()
    arguments = (kind(tmp_path / "text", documents), str(prepared_path))
    options = {"validation_fraction": 0.2, "test_fraction": 0.2}
    whole = prepare(*arguments, tmp_path / "whole", **options)
    parts = [
        prepare(*arguments, tmp_path / "out", part=f"{number}/3", **options) for number in (2, 1, 3)
    ]
    manifest = join(tmp_path / "out")
    assert tokens(tmp_path / "out") == tokens(tmp_path / "whole")
    for count in ("documents", "tokens", "words", "bytes"):
        by_split = [[getattr(each.splits[name], count) for name in SPLITS] for each in parts]
        assert [getattr(manifest.splits[name], count) for name in SPLITS] == [
            sum(numbers) for numbers in zip(*by_split, strict=True)
        ]
    assert manifest.left_out == whole.left_out
    assert manifest.splits["validation"].documents >= 3  # held out of each part
    data = PreparedData.open(tmp_path / "out")
    data.verify()
    assert data.manifest == manifest
    first = PreparedData.open(part_folder(tmp_path / "out", "1/3")).split("train")
    length = first.num_tokens
    assert (data.split("train").read(0, length) == first.read(0, length)).all()


def test_parts_of_two_requests_are_refused(tmp_path, documents, prepared_path):
    source = jsonl(tmp_path / "a.jsonl", documents)
    prepare(source, str(prepared_path), tmp_path / "out", part="1/2")
    prepare(source, str(prepared_path), tmp_path / "out", part="2/2", test_fraction=0.1)
    with pytest.raises(DataError, match=r"part-2-of-2: was prepared with another test_fraction"):
        join(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parts_that_are_missing_of_two_counts_or_damaged_are_named(
    tmp_path, documents, prepared_path
):
    with pytest.raises(DataError, match=r"--join: .*none"):
        join(tmp_path / "out")
    source = jsonl(tmp_path / "a.jsonl", documents)
    for part in ("1/3", "3/3"):
        prepare(source, str(prepared_path), tmp_path / "out", part=part)
    with pytest.raises(DataError, match="1/3, 3/3"):
        join(tmp_path / "out")
    prepare(source, str(prepared_path), tmp_path / "out", part="2/3")
    flip(tmp_path / "out.part-2-of-3" / "train.bin", 100)
    with pytest.raises(DataError, match=r"part-2-of-3.train\.bin: "):
        join(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.copytree(tmp_path / "out.part-1-of-3", tmp_path / "out.part-1-of-2")
    with pytest.raises(DataError, match="1/2, 1/3, 2/3, 3/3"):
        join(tmp_path / "out")


def test_a_part_needs_documents(tmp_path, prepared_path):
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    with pytest.raises(DataError, match=r"--part: 1/2.* too few documents"):
        prepare(str(tmp_path / "a.txt"), str(prepared_path), tmp_path / "out", part="1/2")
