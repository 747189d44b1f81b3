"""Parts of a file, one after the other, are the file: documents, and the parts these come in."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyad.data.text.readers
from polyad.data.errors import DataError
from polyad.data.text.documents import open_source

LINES = st.lists(st.text("ab \r\té漢🙂", max_size=30), max_size=20)
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def pieces(source):
    return [(document.text, document.is_last) for document in source.documents()]


def in_parts(source, parts):
    return [piece for number in range(parts) for piece in pieces(source.part(number, parts))]


@SETTINGS
@given(lines=LINES, parts=st.integers(1, 30), part_bytes=st.sampled_from([5, 16, 64]))
def test_lines_come_in_the_same_pieces(tmp_path, monkeypatch, lines, parts, part_bytes):
    # A long line comes in pieces, at whose ends it may be cut to be encoded.
    monkeypatch.setattr(polyad.data.text.readers, "PART_BYTES", part_bytes)
    (tmp_path / "a.txt").write_bytes("\n".join(lines).encode())
    (tmp_path / "b.txt").write_bytes(("\n".join(lines[::-1]) + "x\n").encode())
    source = open_source(str(tmp_path), documents="lines")
    assert in_parts(source, parts) == pieces(source)


@SETTINGS
@given(texts=LINES, parts=st.integers(1, 30))
def test_objects_of_a_line_are_all_there_once(tmp_path, texts, parts):
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps({"text": each}) for each in texts))
    (tmp_path / "b.jsonl").write_text('{"text": "last"}\n')
    source = open_source(str(tmp_path))
    assert in_parts(source, parts) == pieces(source)


@pytest.mark.parametrize("groups", [[], [5], [1, 1, 1], [4, 2, 7]])
def test_row_groups_are_all_there_once(tmp_path, groups):
    schema = pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for number, rows in enumerate(groups):
            texts = [f"{number} {row}" for row in range(rows)]
            writer.write_table(pyarrow.table({"text": texts}, schema=schema))
    source = open_source(str(tmp_path))
    assert len(pieces(source)) == sum(groups)
    for parts in (1, 2, 3, 8):
        assert in_parts(source, parts) == pieces(source)
    if len(groups) > 1:  # it is cut
        assert all(len(pieces(source.part(number, 3))) < sum(groups) for number in range(3))


def test_errors_name_the_place_in_the_whole_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xff\n")
    last = open_source(str(tmp_path), documents="lines").part(2, 3)
    with pytest.raises(DataError, match=r"a\.txt: byte 11 \(line 3\) is not UTF-8"):
        pieces(last)
