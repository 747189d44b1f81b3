"""Prepared data: what is damaged or another one than was prepared is refused in one line."""

import pytest

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.manifest import MANIFEST_FILE, Manifest
from polyad.data.text.prepare import prepare
from tests.helpers.prepared import flip, rewrite


def test_the_fingerprint_is_of_tokens_and_tokenizer_alone(copy):
    before = Manifest.read(copy)
    rewrite(copy, lambda tree: tree | {"left_out": {"more": 5}})
    assert Manifest.read(copy).fingerprint == before.fingerprint
    other = dict(before.sha256) | {"validation.idx": "0" * 64}
    rewrite(copy, lambda tree: tree | {"sha256": other})
    assert Manifest.read(copy).fingerprint != before.fingerprint


def faults(data):
    return [reason for name in data.manifest.sha256 if (reason := data.damage(name))]


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "test.bin", "tokenizer.json"])
def test_a_flipped_bit_anywhere_is_found_in_its_file(copy, name):
    path = copy / name
    good = path.read_bytes()
    data = PreparedData.open(copy)
    assert {*data.manifest.sha256, MANIFEST_FILE} == {path.name for path in copy.iterdir()}
    for place in sorted({0, len(good) - 1, *range(0, len(good), len(good) // 10)}):
        flip(path, place, bit=place % 8)
        assert faults(data)[0].startswith(f"{path}: damaged")
        path.write_bytes(good)
    path.unlink()
    assert faults(data) == [f"{path}: cannot be read: No such file or directory"]


def test_reads_outside_are_index_errors(prepared):
    stream = prepared.split("test")
    for start, stop in ((-1, 2), (3, 2), (0, stream.num_tokens + 1)):
        with pytest.raises(IndexError):
            stream.read(start, stop)


def test_empty_split_is_empty(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    prepare(str(tmp_path / "a.txt"), "train:300", tmp_path / "out")
    stream = PreparedData.open(tmp_path / "out").split("test")
    assert (stream.num_tokens, len(stream.document_lengths), len(stream.read(0, 0))) == (0, 0, 0)


def test_another_tokenizer_is_refused_when_it_is_read(copy):
    path = copy / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    with pytest.raises(DataError, match="is not the tokenizer that made these tokens"):
        PreparedData.open(copy).tokenizer()


def test_damage_that_reading_meets_is_one_line(copy):
    stream = PreparedData.open(copy).split("train")
    stream.vocab_size = 300
    with pytest.raises(DataError, match=r"train\.bin: damaged: token [\d,]+ is not in the vocab"):
        stream.read(0, stream.num_tokens)
    flip(copy / "train.idx", 34 + 4, bit=1)
    with pytest.raises(DataError, match=r"train\.idx: damaged: the lengths of its documents"):
        PreparedData.open(copy).split("train").document_lengths  # noqa: B018
