"""Every file of a prepared folder, damaged at many places: found and named."""

import shutil

import numpy as np
import pytest

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.indexed import index_bytes
from polyad.data.text.manifest import FILES, Manifest
from polyad.data.text.verification import bytes_to_verify, check_split, unsealed, verify_files
from tests.helpers.everyday import everyday
from tests.helpers.prepared import age, flip, silent


@pytest.fixture(params=["sealed", "version 1"])
def copy(prepared_path, tmp_path, request):
    folder = shutil.copytree(prepared_path, tmp_path / "corpus")
    if request.param == "version 1":
        age(folder)
    return folder


def damaged(folder):
    reports = list(verify_files(folder))
    for report in reports:
        assert report.reason is None or "\n" not in report.reason
    return {report.name: report.reason for report in reports if report.reason is not None}


def test_a_whole_folder_is_whole_and_all_of_it_is_read(copy):
    read = []
    reports = list(verify_files(copy, read.append))
    assert {report.name for report in reports} == FILES - {"tokenizer.model"}
    assert [report.reason for report in reports] == [None] * len(reports)
    assert sum(read) == bytes_to_verify(copy)
    assert all(report.bytes == (copy / report.name).stat().st_size for report in reports)
    note = unsealed(Manifest.read(copy))
    assert (note is None) == (Manifest.read(copy).format_version == 2)


@everyday(
    "name", ["train.bin", "train.idx", "test.bin", "test.idx"], keep=["train.bin", "test.idx"]
)
def test_a_flipped_bit_anywhere_is_found_in_its_file(copy, name):
    path = copy / name
    good = path.read_bytes()
    for place in sorted({0, len(good) - 1, *range(0, len(good), max(1, len(good) // 40))}):
        flip(path, place, bit=place % 8)
        found = damaged(copy)
        assert list(found) == [name], place
        assert found[name].startswith(f"{path}: ")
        path.write_bytes(good)
    assert damaged(copy) == {}


def test_a_missing_cut_or_foreign_file_is_named_and_the_rest_is_still_read(copy, tmp_path, texts):
    (copy / "test.bin").unlink()
    content = (copy / "train.idx").read_bytes()
    (copy / "train.idx").write_bytes(content[:-1])
    flip(copy / "validation.bin", 1000)
    path = copy / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    found = damaged(copy)
    assert sorted(found) == ["test.bin", "tokenizer.json", "train.idx", "validation.bin"]
    assert "missing" in found["test.bin"]
    assert f"{len(content):,}" in found["train.idx"]


def test_documents_that_an_old_index_joins_are_found(copy):
    """Its lengths still add up, and neither end of the file shows it."""
    info = Manifest.read(copy).splits["train"]
    path = copy / "train.idx"
    content = path.read_bytes()
    header = content[: len(content) - index_bytes(info.documents) + 34]
    lengths = np.frombuffer(content, np.int32, info.documents, len(header)).copy()
    lengths[3] -= 2
    lengths[4] += 2
    pointers = np.zeros(info.documents, np.int64)
    np.cumsum(lengths[:-1], out=pointers[1:])
    bounds = np.arange(info.documents + 1, dtype=np.int64)
    path.write_bytes(header + lengths.tobytes() + (pointers * 2).tobytes() + bounds.tobytes())
    assert list(damaged(copy)) == ["train.idx"]


@pytest.mark.parametrize("kind", ["words", "text that ends documents"])
def test_what_ends_documents_is_in_no_document(tmp_path, kind):
    """Whatever a text says: the end of documents is what an old index is compared with."""
    (tmp_path / "a.txt").write_text("one <|endoftext|> two </s> <eos>\n\nthree <|endoftext|>\n" * 9)
    tokenizer = "words" if kind == "words" else "train:300"
    silent(str(tmp_path), tokenizer, tmp_path / "out")
    age(tmp_path / "out")
    assert damaged(tmp_path / "out") == {}


def test_a_token_outside_of_the_vocabulary_is_refused_wherever_it_is(prepared_path, tmp_path):
    data = PreparedData.open(prepared_path)
    tokens = data.split("train").read(0, 100)
    stream = data.split("train")
    stream.vocab_size = int(tokens.max())
    with pytest.raises(DataError, match=r"train\.bin: damaged: token [\d,]+ is "):
        stream.read(0, 100)


def test_an_index_of_other_tokens_is_refused_when_it_is_opened(copy):
    path = copy / "train.idx"
    flip(path, 17, bit=2)  # the type of a token: 8 is uint16
    with pytest.raises(DataError, match="does not begin as an index of uint16 tokens does"):
        check_split(copy, "train", Manifest.read(copy))


def test_lengths_that_do_not_add_up_are_refused_when_they_are_read(copy):
    info = Manifest.read(copy).splits["train"]
    stream = PreparedData.open(copy).split("train")
    flip(copy / "train.idx", 34 + 4 * (info.documents // 2), bit=1)
    with pytest.raises(DataError, match=r"train\.idx: damaged: the lengths of its documents"):
        stream.document_lengths  # noqa: B018
