"""The files of documents are those whose text the documents hold."""

import json

import pytest

from polyad.data.text import origins
from polyad.data.text.dataset import PreparedData
from polyad.data.text.origins import files_of_documents
from tests.helpers.prepared import silent


def texts_of(data, split):
    """The text of each document of a split."""
    tokenizer, stream = data.tokenizer(), data.split(split)
    return [tokenizer.decode(stream.read_document(n)[:-1]) for n in range(stream.num_documents)]


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "source"
    for number in range(30):
        path = source / f"{number % 3}" / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number}\nof a file\n" if number != 7 else "")  # is left out
    lines = [json.dumps({"text": f"line {number}"}) + "\n" for number in range(20)]
    (source / "more.jsonl").write_text("".join(lines))
    silent(str(source), "train:300", tmp_path / "data")
    return source


def test_documents_of_files_and_of_lines_have_their_names(folder, tmp_path):
    data = PreparedData.open(tmp_path / "data")
    for split in ("train", "validation", "test"):
        texts = texts_of(data, split)
        assert texts
        found = files_of_documents(data.manifest, split, range(len(texts)))
        assert list(found) == list(range(len(texts)))
        for number, text in enumerate(texts):
            name, _, line = found[number].partition("#")
            whole = (folder / name).read_text()
            assert text == (json.loads(whole.splitlines()[int(line)])["text"] if line else whole)
    assert set(files_of_documents(data.manifest, "train", {3})) == {3}
    assert files_of_documents(data.manifest, "train", ()) == {}


def test_a_split_from_elsewhere_has_its_own_files(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for number in range(3):
        (other / f"{number}.txt").write_text(f"held out {number}")
    silent(str(folder), "train:300", tmp_path / "two", validation_source=str(other))
    data = PreparedData.open(tmp_path / "two")
    found = files_of_documents(data.manifest, "validation", {0, 2})
    assert found == {0: "0.txt", 2: "2.txt"}
    texts = texts_of(data, "test")
    found = files_of_documents(data.manifest, "test", {0})
    assert (folder / found[0]).read_text() == texts[0]


def test_nothing_is_named_where_files_are_not_as_they_were(folder, tmp_path, monkeypatch):
    manifest = PreparedData.open(tmp_path / "data").manifest
    assert files_of_documents(manifest, "train", {0})
    with monkeypatch.context() as patched:
        patched.setattr(origins, "MOST_BYTES", 10)
        assert files_of_documents(manifest, "train", {0}) == {}
    (folder / "2" / "29.txt").write_text("text of another length")
    assert files_of_documents(manifest, "train", {0}) == {}
    folder.rename(tmp_path / "elsewhere")
    assert files_of_documents(manifest, "train", {0}) == {}


def test_text_that_was_split_by_position_names_no_file(tmp_path):
    source = tmp_path / "one.txt"
    source.write_text("some words\n" * 400)
    silent(str(source), "train:300", tmp_path / "data")
    manifest = PreparedData.open(tmp_path / "data").manifest
    assert manifest.split_by == "position"
    assert files_of_documents(manifest, "train", {0}) == {}
