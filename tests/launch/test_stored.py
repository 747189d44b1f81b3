"""`polyad checkpoint` and `polyad data verify`: what they say of folders, good or damaged."""

import json

import pytest
import torch

from polyad.launch.cli import run as polyad
from tests.helpers.prepared import flip
from tests.helpers.saving import save_tensors

NAMES = ("step-00000002", "step-00000004", "step-00000006")


@pytest.fixture
def folder(tmp_path):
    """A run's folder with three checkpoints of one tensor each."""
    folder, weight = tmp_path / "run" / "checkpoints", torch.arange(1000.0)
    for name in NAMES:
        save_tensors(folder / name, {"weight": weight}, saved_at=1.8e9, world_size=2)
    (folder / "latest").write_text(f"{NAMES[-1]}\n")
    return folder


def result(capfd, *arguments, status=0):
    assert polyad(["checkpoint", *map(str, arguments), "--json", "-"]) == status
    return json.loads(capfd.readouterr().out)


def test_a_list_is_aligned_and_cheap(folder, capfd):
    flip(folder / NAMES[1] / "rank-00000.safetensors", -1)  # which only reading tells
    flip(folder / NAMES[0] / "state.json", -1)
    (folder / ".step-00000008.0badcafe.partial").mkdir()
    listed = result(capfd, "list", folder.parent)["checkpoints"]
    statuses = ["damaged", "complete", "complete", "unfinished"]
    assert [about["status"] for about in listed] == statuses
    assert listed[1]["bytes"] == sum(
        path.stat().st_size for path in (folder / NAMES[1]).iterdir() if path.stem != "manifest"
    )
    assert polyad(["checkpoint", "list", str(folder)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "MB", "processes", "saved", "status"]
    assert len({len(line) for line in lines[:4]}) == 1  # columns to the right end alike
    assert lines[-1].startswith(str(folder / NAMES[0] / "state.json"))


def test_verify_finds_one_bit_and_says_so_in_its_status(folder, capfd):
    whole = result(capfd, "verify", folder.parent)
    assert [about["status"] for about in whole["checkpoints"]] == ["verified"] * 3
    assert whole["good"]
    flip(folder / NAMES[1] / "rank-00000.safetensors", -1)
    found = result(capfd, "verify", folder, status=2)
    statuses = ["verified", "damaged", "verified"]
    assert [about["status"] for about in found["checkpoints"]] == statuses
    assert "step-00000004/rank-00000.safetensors: damaged" in found["checkpoints"][1]["reason"]
    assert result(capfd, "verify", folder / NAMES[2])["good"]


def test_what_is_no_checkpoint_is_refused(tmp_path, refused):
    assert "there is no such folder" in refused("checkpoint", "list", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in refused("checkpoint", "verify", tmp_path / "empty")


def test_whole_folders_are_verified_and_the_table_is_aligned(copy, prepared_path, capfd):
    assert polyad(["data", "verify", str(copy), str(prepared_path)]) == 0
    captured = capfd.readouterr()
    *rows, last = captured.out.splitlines()
    assert rows[0].split()[0] == "file"
    assert len({len(row) for row in rows}) == 1
    assert [row.split()[-1] for row in rows[1:]] == ["verified"] * 14
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
    files = [file for about in result["folders"] for file in about["files"]]
    assert [file["name"] for file in files if file["status"] == "damaged"] == ["train.bin"]
    (copy / "test.idx").unlink()
    assert polyad(["data", "verify", str(copy)]) == 2
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert line.endswith("(and 1 more damaged file)")
    assert sum(row.endswith("damaged") for row in captured.out.splitlines()) == 2


def test_what_is_not_prepared_data_is_refused_before_anything_is_read(copy, tmp_path, refused):
    for other in (tmp_path, tmp_path / "corpsu"):
        assert str(other) in refused("data", "verify", copy, other)
