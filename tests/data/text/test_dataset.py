import json
import pickle
import shutil

import numpy as np
import pytest

from polyad.data.errors import DataError
from polyad.data.prepared import MANIFEST_FILE
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from tests.helpers.prepared import rewrite


@pytest.fixture
def copy(prepared_path, tmp_path):
    return shutil.copytree(prepared_path, tmp_path / "corpus")


def error_of(path):
    with pytest.raises(DataError) as caught:
        PreparedData.open(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(folder, **changes):
    rewrite(folder, lambda tree: tree | changes)


def test_reads_agree_with_the_bytes(prepared):
    stream = prepared.split("train")
    raw = np.fromfile(prepared.path / "train.bin", dtype=np.uint16)
    assert stream.num_tokens == len(raw)
    tokens = stream.read(100, 700)
    assert tokens.dtype == np.int64
    np.testing.assert_array_equal(tokens, raw[100:700])
    begin = int(stream.document_lengths[:4].sum())
    np.testing.assert_array_equal(stream.read_document(4, 5, 9), raw[begin + 5 : begin + 14])
    assert len(stream.read(7, 7)) == 0


def test_reads_outside_are_index_errors(prepared):
    stream = prepared.split("test")
    length = int(stream.document_lengths[0])
    for start, stop in ((-1, 2), (3, 2), (0, stream.num_tokens + 1)):
        with pytest.raises(IndexError):
            stream.read(start, stop)
    for arguments in ((-1,), (stream.num_documents,), (0, 0, length + 1), (0, length + 1)):
        with pytest.raises(IndexError):
            stream.read_document(*arguments)


def test_stream_travels_to_another_process(prepared):
    stream = prepared.split("train")
    expected = stream.read(0, 50)
    travelled = pickle.loads(pickle.dumps(stream))  # what multiprocessing does
    np.testing.assert_array_equal(travelled.read(0, 50), expected)


def test_empty_split_is_empty(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    prepare(str(tmp_path / "a.txt"), "train:300", tmp_path / "out", report=lambda line: None)
    stream = PreparedData.open(tmp_path / "out").split("test")
    assert (stream.num_tokens, len(stream.document_lengths), len(stream.read(0, 0))) == (0, 0, 0)


def test_missing_folder_suggests_a_prepared_one(copy):
    (copy.parent / "corpsu-notes").mkdir()
    assert "did you mean 'corpus'?" in error_of(copy.parent / "corpsu")
    assert "polyad prepare" in error_of(copy.parent)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not a readable manifest"),
        ("[]", "not a readable manifest"),
        ("{}", "not a readable manifest"),
        ('{"format_version": 99}', "format version 99; this Polyad reads versions 1 to 2"),
        ('{"format_version": 1}', "key 'request': Field required"),
    ],
)
def test_bad_manifest_is_one_line(copy, content, expected):
    (copy / MANIFEST_FILE).write_text(content)
    assert expected in error_of(copy)


def test_split_missing_from_the_manifest_is_refused(copy):
    splits = json.loads((copy / MANIFEST_FILE).read_text())["splits"]
    splits.pop("test")
    edit(copy, splits=splits)
    assert "no 'test'" in error_of(copy)


@pytest.mark.parametrize("name", ["train.bin", "validation.idx", "tokenizer.json"])
def test_missing_file_is_named(copy, name):
    (copy / name).unlink()
    assert name in error_of(copy)


@pytest.mark.parametrize("name", ["train.bin", "test.idx"])
def test_truncated_file_is_named(copy, name):
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[:-2])
    message = error_of(copy)
    assert name in message
    assert f"{len(content):,}" in message


def test_file_of_another_data_set_is_refused(copy, tmp_path, texts):
    other = tmp_path / "other"
    prepare(str(texts), "train:390", other, report=lambda line: None)
    shutil.copy(other / "train.bin", copy / "train.bin")
    assert "train.bin" in error_of(copy)
    shutil.copy(other / "train.idx", copy / "train.idx")
    assert "another data set" in error_of(copy)


def test_swapped_file_of_the_same_size_is_refused(copy):
    content = np.fromfile(copy / "train.bin", dtype=np.uint16)
    np.roll(content, 1).tofile(copy / "train.bin")
    assert "train.bin" in error_of(copy)


def test_index_of_another_length_is_refused(copy):
    content = bytearray((copy / "train.idx").read_bytes())
    content[18] += 1
    (copy / "train.idx").write_bytes(content)
    assert "train.idx: lists" in error_of(copy)


def test_other_tokenizer_is_refused(copy):
    path = copy / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    assert "not the tokenizer that made these tokens" in error_of(copy)


def test_token_id_outside_the_vocabulary_is_refused(copy):
    manifest = json.loads((copy / MANIFEST_FILE).read_text())
    edit(copy, tokenizer=manifest["tokenizer"] | {"vocab_size": 300})
    assert "vocabulary ends at 299" in error_of(copy)


def test_verify_finds_a_flipped_bit_in_the_middle(copy):
    path = copy / "train.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    data = PreparedData.open(copy)
    with pytest.raises(DataError, match=r"train\.bin: damaged"):
        data.verify()
