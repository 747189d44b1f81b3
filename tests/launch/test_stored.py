"""`polyad checkpoint` and `polyad data verify`: what they say of folders, good or damaged."""

import json
import shutil

import pytest
import torch

from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.writing import save_weights, write_rest
from tests.helpers.prepared import flip

NAMES = ("step-00000002", "step-00000004", "step-00000006")


@pytest.fixture
def folder(tmp_path):
    """A run's folder with three checkpoints of one tensor each."""
    values = torch.arange(1000.0)
    for name in NAMES:
        path = tmp_path / "run" / "checkpoints" / name
        path.mkdir(parents=True)
        save_weights(
            path, {"weight": (1000,)}, lambda name: values, buffers={}, config_yaml="",
            state={"saved_at": 1.8e9, "world_size": 2},
        )  # fmt: skip
    (tmp_path / "run" / "checkpoints" / "latest").write_text(f"{NAMES[-1]}\n")
    return tmp_path / "run" / "checkpoints"


def damage(path, position=-1):
    data = bytearray(path.read_bytes())
    data[position] ^= 64
    path.write_bytes(data)


def result(capfd, *arguments, status=0):
    assert polyad(["checkpoint", *map(str, arguments), "--json", "-"]) == status
    return json.loads(capfd.readouterr().out)


def refused(capfd, *arguments):
    assert polyad(["checkpoint", *map(str, arguments)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


def test_a_list_is_aligned_and_cheap(folder, capfd):
    damage(folder / NAMES[1] / "rank-00000.safetensors")  # which only reading tells
    damage(folder / NAMES[0] / "state.json")
    (folder / ".step-00000008.0badcafe.partial").mkdir()
    listed = result(capfd, "list", folder.parent)["checkpoints"]
    assert [about["status"] for about in listed] == [
        "damaged",
        "complete",
        "complete",
        "unfinished",
    ]
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
    damage(folder / NAMES[1] / "rank-00000.safetensors")
    found = result(capfd, "verify", folder, status=2)
    assert [about["status"] for about in found["checkpoints"]] == [
        "verified",
        "damaged",
        "verified",
    ]
    assert "step-00000004/rank-00000.safetensors: damaged" in found["checkpoints"][1]["reason"]
    assert result(capfd, "verify", folder / NAMES[2])["good"]


def test_delete_leaves_the_last_good_one(folder, capfd):
    damage(folder / NAMES[0] / "rank-00000.safetensors")
    damage(folder / NAMES[2] / "rank-00000.safetensors")
    line = refused(capfd, "delete", folder / NAMES[1])
    assert f"{folder / NAMES[1]}: is the last good checkpoint in {folder}" in line
    assert "last good" in refused(capfd, "delete", *(folder / name for name in NAMES))
    assert sorted(path.name for path in folder.iterdir()) == ["latest", *NAMES]
    deleted = result(capfd, "delete", folder / NAMES[2], folder / NAMES[0])["deleted"]
    assert [about["name"] for about in deleted] == [NAMES[2], NAMES[0]]
    assert (folder / "latest").read_text() == f"{NAMES[1]}\n"
    assert polyad(["checkpoint", "delete", str(folder / NAMES[1]), "--even-the-last-good"]) == 0
    assert list(folder.iterdir()) == []


def test_a_checkpoint_that_is_not_finite_or_not_judged_is_not_the_good_one(
    folder, tmp_path, capfd, monkeypatch
):
    unfinished = {
        "step": 4, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "step_seconds": 1.0,
        "mfu": None, "skipped": False, "skipped_steps": 0,
    }  # fmt: skip
    for name, value, state in (
        (NAMES[1], 1.0, {"step": 4, "unfinished": unfinished}),
        (NAMES[2], float("nan"), {}),
    ):
        shutil.rmtree(folder / name)
        (folder / name).mkdir()
        with monkeypatch.context() as older:  # versions that wrote whatever there was
            older.setattr("polyad.parallel.checkpoint.writing.all_finite", lambda data: True)
            older.setattr(
                "polyad.parallel.checkpoint.writing.write_rest", write_rest_of(int(name[5:]))
            )
            save_weights(
                folder / name, {"weight": (3,)}, lambda _, value=value: torch.full((3,), value),
                buffers={}, config_yaml="", state=state,
            )  # fmt: skip
    assert [
        about["status"] for about in result(capfd, "verify", folder)["checkpoints"]
    ] == ["verified"] * 3  # fmt: skip
    assert f"{NAMES[0]}: is the last good" in refused(capfd, "delete", folder / NAMES[0])
    assert polyad(["checkpoint", "delete", str(folder / NAMES[2])]) == 0
    assert polyad(["checkpoint", "delete", str(folder / NAMES[1])]) == 0


def write_rest_of(step):
    """Writes the rest of a checkpoint of another step than 0."""
    return lambda folder, _, shards, others: write_rest(folder, step, shards, others)


def test_what_is_no_checkpoint_is_refused(folder, tmp_path, capfd):
    assert "there is no such folder" in refused(capfd, "list", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in refused(capfd, "verify", tmp_path / "empty")
    assert "is not a checkpoint" in refused(capfd, "delete", folder)
    assert "is not a checkpoint" in refused(capfd, "delete", folder / "step-00000099")
    shutil.rmtree(folder / NAMES[0])
    shutil.rmtree(folder / NAMES[1])
    assert "is the last good" in refused(capfd, "delete", folder / NAMES[2])


@pytest.fixture
def copy(prepared_path, tmp_path):
    return shutil.copytree(prepared_path, tmp_path / "corpus")


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


def test_what_is_not_prepared_data_is_refused_before_anything_is_read(copy, tmp_path, capfd):
    for other in (tmp_path, tmp_path / "corpsu"):
        assert polyad(["data", "verify", str(copy), str(other)]) == 2
        captured = capfd.readouterr()
        (line,) = captured.err.splitlines()
        assert str(other) in line
        assert captured.out == ""
