"""Sources give their documents, whole and in parts, and nothing else that is in a folder."""

import argparse
import gzip
import inspect
import json
import sysconfig
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from polyad.data.errors import DataError
from polyad.data.text.manifest import ReadOptions
from polyad.data.text.sources import LEFT_OUT, PYTHON_STDLIB, Document
from tests.helpers.prepared import open_source
from tests.helpers.refusals import line_of


def read(path: Path, **options: str) -> list[str]:
    return [
        document.text for document in open_source(str(path), ReadOptions(**options)).documents()
    ]


def error_of(path: Path, **options: str) -> str:
    return line_of(DataError, read, path, **options)


def write_parquet(path: Path, **columns: list[object]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=100)
    return path


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_a_text_file_is_one_document_whatever_it_holds(tmp_path, library_text, ending):
    content = "\ufeff漢\0\n\n" + library_text.replace("\n", ending)
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert list(open_source(str(tmp_path)).documents()) == [
        Document(str(tmp_path / "a.txt"), content)
    ]


def test_a_line_is_one_document_where_that_is_asked_for(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\n\n \t\n  two words, 漢字 \nx\ry\r\n\nu\u2028v\x0c\nlast".encode())
    lines = ["one", "  two words, 漢字 ", "x\ry", "u\u2028v\x0c", "last"]
    assert read(path, documents="lines") == lines


def test_format_text_reads_files_of_any_name(tmp_path):
    for name in ("a.md", "b.py", "c.log", "Makefile", "d.jsonl"):
        (tmp_path / name).write_text(f"{name}\n")
    assert read(tmp_path, file_format="text") == [
        *("Makefile\n", "a.md\n", "b.py\n", "c.log\n", "d.jsonl\n")
    ]
    assert read(tmp_path / "b.py", file_format="text") == ["b.py\n"]
    assert read(tmp_path / "d.jsonl", file_format="text", documents="lines") == ["d.jsonl"]


def test_folder_mixes_kinds_in_sorted_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n')
    write_parquet(tmp_path / "sub" / "c.parquet", text=["three", "four"])
    with gzip.open(tmp_path / "sub" / "d.jsonl.gz", "wt") as file:
        file.write('{"text": "five"}')
    (tmp_path / "sub" / "empty.txt").touch()
    (tmp_path / "image.png").touch()
    (tmp_path / ".hidden.txt").write_text("no")
    left_out = Counter()
    documents = open_source(str(tmp_path)).documents(left_out)
    assert [document.text for document in documents] == ["one", "two", "three", "four", "five"]
    assert left_out == {"documents without text": 2}


def test_text_key_chooses_key_and_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one", "text": 3}\n')
    write_parquet(tmp_path / "b.parquet", body=["two"] * 250, other=[1] * 250)
    assert read(tmp_path, text_key="body") == ["one"] + ["two"] * 250


def test_lines_are_read_from_compressed_files_of_several_frames(tmp_path):
    lines = [json.dumps({"text": f"{number} {'x' * 99}"}).encode() + b"\n" for number in range(9)]
    for name, codec in (("a.jsonl.gz", "gzip"), ("b.jsonl.zst", "zstd")):
        frames = [pyarrow.compress(line, codec, asbytes=True) for line in lines]
        (tmp_path / name).write_bytes(b"".join(frames))
    assert read(tmp_path) == [json.loads(line)["text"] for line in lines] * 2


def test_texts_of_a_csv_are_strings_whatever_they_look_like(tmp_path):
    rows = '"two\nlines, ""quoted""",1\nNA,2\n007,3\nnull,4\n,5\n'
    (tmp_path / "a.csv").write_text("text,label\n" + rows)
    assert read(tmp_path) == ['two\nlines, "quoted"', "NA", "007", "null"]


def test_strings_of_every_kind_are_read_from_parquet(tmp_path):
    for kind in (pyarrow.large_string(), pyarrow.string_view()):
        path = write_parquet(tmp_path / "a.parquet", text=pyarrow.array(["one", "two"], kind))
        assert read(path) == ["one", "two"]
    names = ["text", "text"]
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=names)
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    assert "b.parquet: " in error_of(tmp_path / "b.parquet")


def test_links_are_followed_or_refused_and_never_left_out(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for folder in (root, elsewhere):
        folder.mkdir()
    (root / "a.txt").write_text("one")
    (elsewhere / "b.txt").write_text("two")
    (root / "linked").symlink_to(elsewhere)
    (root / "c.txt").symlink_to(elsewhere / "b.txt")
    assert read(root) == ["one", "two", "two"]
    (root / "d.txt").symlink_to(tmp_path / "gone.txt")
    assert f"{root}/d.txt: cannot be read: No such file" in error_of(root)
    (root / "d.txt").unlink()
    (elsewhere / "up").symlink_to(root)
    assert "cannot be read: " in error_of(root)


def test_documents_are_the_modules_sorted_and_without_tests():
    root = sysconfig.get_path("stdlib")
    texts = {
        str(Path(document.name).relative_to(root)): document.text
        for document in open_source(PYTHON_STDLIB).documents()
    }
    assert texts["argparse.py"] == inspect.getsource(argparse)
    assert sum(map(len, texts.values())) > 5_000_000
    parts = [tuple(name.split("/")) for name in texts]
    assert ("json", "decoder.py") in parts
    assert parts == sorted(parts)
    assert not any(set(name) & LEFT_OUT for name in parts)


def test_undecodable_module_is_skipped_and_counted(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").write_bytes(b"# coding: latin-1\n# \xe9\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "c.py").write_text("c = 1\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    left_out = Counter()
    documents = list(open_source(PYTHON_STDLIB).documents(left_out))
    assert [document.name for document in documents] == [str(tmp_path / "a.py")]
    assert left_out["unreadable files"] == 1


def test_modules_of_a_package_are_read_without_importing_it():
    root = Path(yaml.__file__).parent
    texts = {
        str(Path(document.name).relative_to(root)): document.text
        for document in open_source("python:yaml").documents()
    }
    assert texts["loader.py"] == inspect.getsource(yaml.loader)
    assert sorted(texts) == list(texts)
