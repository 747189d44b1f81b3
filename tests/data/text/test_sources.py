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
from polyad.data.text.sources import (
    LEFT_OUT,
    PYTHON_STDLIB,
    Document,
    open_source,
)


def read(path: Path, **options: str) -> list[str]:
    return [
        document.text for document in open_source(str(path), ReadOptions(**options)).documents()
    ]


def error_of(path: Path | str, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        list(open_source(str(path), ReadOptions(**options)).documents())
    message = str(caught.value)
    assert "\n" not in message
    return message


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
    path.write_bytes(b"fine\n\xff\n")
    assert "a.txt: cannot be read: " in error_of(path, documents="lines")


def test_format_text_reads_files_of_any_name(tmp_path):
    for name in ("a.md", "b.py", "c.log", "Makefile", "d.jsonl"):
        (tmp_path / name).write_text(f"{name}\n")
    assert read(tmp_path, file_format="text") == [
        *("Makefile\n", "a.md\n", "b.py\n", "c.log\n", "d.jsonl\n")
    ]
    assert read(tmp_path / "b.py", file_format="text") == ["b.py\n"]
    assert read(tmp_path / "d.jsonl", file_format="text", documents="lines") == ["d.jsonl"]
    assert "--format text" in error_of(tmp_path / "b.py")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert "image.png: cannot be read: " in error_of(tmp_path, file_format="text")


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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{nonsense", "line 2: is not JSON"),
        ("[1, 2]", "line 2: list where a JSON object is expected"),
        ('{"txt": "a", "id": 1}', "keys present: 'txt', 'id' (did you mean 'txt'?)"),
        ('{"text": 7}', "line 2: 'text' is 7, not a string"),
        ('{"text": null}', "line 2: 'text' is None, not a string"),
        (r'{"text": "\ud800"}', "line 2: 'text' has half a surrogate pair"),
    ],
)
def test_bad_json_line_names_file_and_line(tmp_path, line, expected):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    message = error_of(path)
    assert str(path) in message
    assert expected in message


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
    assert "did you mean 'text'?" in error_of(tmp_path, text_key="txt")


def test_damaged_gzip_names_the_file(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(json.dumps({"text": "a" * 1000}).encode())
    path.write_bytes(whole[:-10])
    assert str(path) in error_of(path)
    path.write_bytes(b"not gzip")
    assert str(path) in error_of(path)
    path = tmp_path / "a.jsonl.zst"
    whole = pyarrow.compress(json.dumps({"text": "ab" * 1000}).encode(), "zstd", asbytes=True)
    path.write_bytes(whole[:-5])
    assert str(path) in error_of(path)


def test_parquet_errors_name_the_columns(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", txt=["a"], id=[1])
    message = error_of(path)
    assert "columns present: 'txt', 'id' (did you mean 'txt'?)" in message
    assert "row 1: 'id' is 1, not a string" in error_of(path, text_key="id")
    assert "row 2" in error_of(write_parquet(tmp_path / "b.parquet", text=["a", None]))
    (tmp_path / "c.parquet").write_bytes(path.read_bytes()[:-20])
    assert "c.parquet: " in error_of(tmp_path / "c.parquet")


def test_strings_of_every_kind_are_read_from_parquet(tmp_path):
    for kind in (pyarrow.large_string(), pyarrow.string_view()):
        path = write_parquet(tmp_path / "a.parquet", text=pyarrow.array(["one", "two"], kind))
        assert read(path) == ["one", "two"]
    names = ["text", "text"]
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=names)
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    assert "b.parquet: " in error_of(tmp_path / "b.parquet")


def test_missing_source_suggests_a_sibling_or_a_known_one(tmp_path):
    (tmp_path / "corpus.txt").write_text("a")
    assert "did you mean 'corpus.txt'?" in error_of(tmp_path / "corpsu.txt")
    assert f"did you mean '{PYTHON_STDLIB}'?" in error_of("python-stdlb")


def test_folder_and_file_of_no_known_kind_are_refused(tmp_path):
    (tmp_path / "a.xyz").write_text("a")
    assert ".jsonl" in error_of(tmp_path)
    assert ".jsonl" in error_of(tmp_path / "a.xyz")


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
    assert f"a link makes {root} contain this folder twice" in error_of(root)


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


@pytest.mark.parametrize("name", ["no_such_package", "yaml.loader", "argparse", "", "../yaml"])
def test_what_is_no_package_is_refused(name):
    with pytest.raises(
        DataError, match=f"^python:{name}: '{name}' is not a package that this Python"
    ):
        open_source(f"python:{name}")
