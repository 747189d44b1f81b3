"""A manifest with a key of a wrong type or value, or of another folder: refused in one line."""

import json
import shutil

import pytest

from polyad.data.errors import DataError
from polyad.data.prepared import MANIFEST_FILE
from polyad.data.text.dataset import PreparedData
from polyad.data.text.manifest import Manifest
from polyad.data.text.prepare import prepare
from tests.helpers.prepared import age, flip, rewrite

WRONG = [None, True, -1, 1.5, 10**30, "x", "", "\x1b[31m" * 99, "\ud800", [], [1], {}, {"x": 1}]
FREE = {
    ("request", "source"), ("request", "validation_source"), ("request", "test_source"),
    ("request", "tokenizer"), ("request", "end_of_text"), ("request", "text_key"),
    ("request", "listings"), ("request", "listings", "train"), ("request", "part"),
}  # fmt: skip
"""Any text will do there, or none."""
TOLD = ("files", "left_out")
"""Counts by reason, which people are told and nothing else reads; older ones lack them."""


@pytest.fixture
def copy(one_source, tmp_path):
    return shutil.copytree(one_source, tmp_path / "corpus")


@pytest.fixture(scope="module")
def one_source(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "modules"
    prepare(str(texts), "train:400", path, report=lambda line: None)
    return path


def check_line(line, folder):
    assert str(folder) in line
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < len(str(folder)) + 500, line
    return line


def refusal(folder):
    with pytest.raises(DataError) as caught:
        PreparedData.open(folder)
    return check_line(str(caught.value), folder)


def paths_of(tree, before=()):
    for key, value in tree.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*before, key))


def put(tree, path, value):
    tree = json.loads(json.dumps(tree))
    place = tree
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return tree


@pytest.mark.parametrize("old", [False, True])
def test_every_key_with_every_wrong_value_is_refused(copy, old):
    if old:
        age(copy)
    good = json.loads((copy / MANIFEST_FILE).read_text())
    accepted, refused = [], 0
    for path in paths_of(good):
        for value in (..., *WRONG):
            changed = put(good, path, value)
            rewrite(copy, lambda _, changed=changed: changed, sealed=path != ("sha256",))
            try:
                PreparedData.open(copy)
            except DataError as error:
                check_line(str(error), copy)
                refused += 1
                continue
            if path[0] in TOLD and value in (..., 10**30, {}, {"x": 1}):
                continue
            if path not in FREE or isinstance(value, int | float | list):
                accepted.append((path, value))
    assert accepted == [  # older ones lack these: they have only tokenizer.json, and so on
        (("request", "documents"), ...),
        (("request", "documents"), None),
        (("request", "file_format"), ...),
        (("request", "file_format"), None),
        (("tokenizer", "file"), ...),
        *((("tokenizer", f"begin_of_text{end}"), no) for end in ("", "_id") for no in (..., None)),
        (("split_by",), ...),
    ]
    assert refused > 400


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("splits.train.bytes", -5, "key 'splits.train.bytes': Input should be greater than or"),
        ("splits.train.bytes", 0, "is more than bytes: 0"),
        ("splits.test.words", 10**12, "key 'splits.test': words: 1000000000000 is more than bytes"),
        ("splits.test.tokens", 1, "is less than documents: "),
        ("splits.test.documents", 0, "key 'splits.test': documents: 0 with tokens: "),
        ("tokenizer.end_of_text_id", 10**9, "end_of_text_id: 1000000000 is not below vocab_size"),
        ("tokenizer.end_of_text_id", 7, "end_of_text_id: 7 of manifest.json"),
        ("tokenizer.vocab_size", 10**9, "dtype: uint16 has no room for tokenizer.vocab_size"),
        ("tokenizer.vocab_size", 60_000, "does not match the tokenizer.vocab_size: 60000"),
        ("tokenizer.file", "../tokenizer.json", "not '../tokenizer.json'"),
        ("fingerprint", "0" * 64, "fingerprint: 000000000000... is not that of the digests"),
        ("splits.test.sha256", "0" * 64, "is not that of the digests"),
        ("splits.test.sha256", "../../x", "String should match pattern"),
        ("tokenizer.vocab_size", 300, "vocabulary ends at 299"),
        ("splits.test", ..., "splits: no 'test'"),
        ("dtype", "int32", "bytes where manifest.json says"),
        ("request.validation_fraction", 1.0, "Input should be less than 1, not 1.0"),
    ],
)
def test_what_a_digest_of_itself_vouches_for_is_checked_too(copy, path, value, expected):
    good = json.loads((copy / MANIFEST_FILE).read_text())
    rewrite(copy, lambda _: put(good, tuple(path.split(".")), value))
    assert expected in refusal(copy)


def test_every_flipped_bit_of_a_number_or_digest_is_refused(copy):
    path = copy / MANIFEST_FILE
    content = path.read_bytes()
    begin = content.index(b'"splits"')
    for place in range(begin, len(content) - 1, 7):
        flip(path, place, bit=place % 8)
        refusal(copy)
        path.write_bytes(content)
    assert Manifest.read(copy).write(copy) == Manifest.read(copy)
    assert path.read_bytes() == content


def test_a_folder_of_version_1_opens_and_has_the_same_fingerprint(copy, one_source):
    age(copy)
    expected = PreparedData.open(one_source).manifest.fingerprint
    assert PreparedData.open(copy).manifest.fingerprint == expected
    rewrite(copy, lambda tree: tree | {"format_version": 2})
    assert "'index_sha256' of all splits from version 2 on" in refusal(copy)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        *((content, "not a readable manifest") for content in (b"{", b"[]", b"{}", b"\xff\xfe")),
        (b"[" * 10**5, "not a readable manifest"),
        (b'{"format_version": ' + b"9" * 9999 + b"}", "not a readable manifest"),
        (b"\0" * 99, "not a readable manifest"),
        (b'{"format_version": 99}', "format version 99; this Polyad reads versions 1 to 2"),
        (b'{"format_version": 1}', "key 'request': Field required"),
    ],
)
def test_what_is_no_manifest_is_refused(copy, content, expected):
    (copy / MANIFEST_FILE).write_bytes(content)
    assert expected in refusal(copy)


@pytest.mark.parametrize("name", [MANIFEST_FILE, "train.bin", "validation.idx", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused_and_one_to_the_folder_is_not(copy, name):
    outside = copy.parent / "outside"
    (copy / name).rename(outside)
    (copy / name).symlink_to(outside)
    assert refusal(copy).startswith(f"{copy / name}: is a symbolic link that leaves the folder")
    (copy / name).unlink()
    (copy / name).symlink_to(name)
    assert refusal(copy).startswith(f"{copy / name}: is a symbolic link that leaves the folder")
    (copy / name).unlink()
    outside.rename(copy / "kept")
    (copy / name).symlink_to("kept")
    (copy.parent / "elsewhere").symlink_to(copy)
    PreparedData.open(copy.parent / "elsewhere").verify()
