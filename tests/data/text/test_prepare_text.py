"""Text files from end to end: what a document of one is, and which split it goes to."""

import pytest

from polyad.data.names import SPLITS
from polyad.data.text.dataset import PreparedData
from polyad.data.text.manifest import Manifest
from polyad.data.text.prepare import prepare


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
