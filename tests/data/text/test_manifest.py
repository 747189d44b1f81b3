"""A manifest with a missing key or a wrong value is refused in one line, as is one of before."""

import pytest

from polyad.data.text.dataset import PreparedData
from polyad.data.text.manifest import MANIFEST_FILE, Manifest
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
