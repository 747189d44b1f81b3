"""`polyad data verify`: what it prints of whole, damaged and old folders, and its status."""

import json
import shutil

import pytest

from polyad.launch.cli import run as polyad
from tests.helpers.prepared import age, flip


@pytest.fixture
def copy(prepared_path, tmp_path):
    return shutil.copytree(prepared_path, tmp_path / "corpus")


def test_whole_folders_are_verified_and_the_table_is_aligned(copy, prepared_path, capfd):
    assert polyad(["data", "verify", str(copy), str(prepared_path)]) == 0
    captured = capfd.readouterr()
    *rows, last = captured.out.splitlines()
    assert rows[0].split()[0] == "file"
    assert len({len(row) for row in rows}) == 1
    assert [row.split()[-1] for row in rows[1:]] == ["verified"] * 16
    assert " MB in " in last
    assert "error" not in captured.err


def test_a_damaged_file_is_named_and_the_status_is_2(copy, prepared_path, capfd):
    size = (copy / "train.bin").stat().st_size
    flip(copy / "train.bin", size // 2 + 1)
    # What opening checks does not see it.
    assert polyad(["data", "verify", str(prepared_path), str(copy), "--json", "-"]) == 2
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"polyad: error: {copy / 'train.bin'}: damaged: ")
    result = json.loads(captured.out)
    assert not result["good"]
    assert [about["good"] for about in result["folders"]] == [True, False]
    damaged = [
        file["name"]
        for about in result["folders"]
        for file in about["files"]
        if file["status"] == "damaged"
    ]
    assert damaged == ["train.bin"]
    (copy / "test.idx").unlink()
    assert polyad(["data", "verify", str(copy)]) == 2
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert line.endswith("(and 1 more damaged file)")
    assert sum(row.endswith("damaged") for row in captured.out.splitlines()) == 2


def test_an_old_folder_says_what_could_be_checked(copy, capfd):
    age(copy)
    assert polyad(["data", "verify", str(copy)]) == 0
    (note,) = [row for row in capfd.readouterr().out.splitlines() if "prepared before" in row]
    assert note.startswith(f"{copy}: prepared before manifest.json and the .idx files had digests")


def test_what_is_not_prepared_data_is_refused_before_anything_is_read(copy, tmp_path, capfd):
    for other in (tmp_path, tmp_path / "corpsu"):
        assert polyad(["data", "verify", str(copy), str(other)]) == 2
        captured = capfd.readouterr()
        (line,) = captured.err.splitlines()
        assert str(other) in line
        assert captured.out == ""
