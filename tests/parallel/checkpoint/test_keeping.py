"""Which checkpoints stay: by hand."""

import errno
import os
import shutil

import pytest
import torch

from polyad.parallel.checkpoint import manage
from polyad.parallel.checkpoint.manage import (
    BEST_FILE,
    Retention,
    complete_checkpoints,
    prune,
    put_back,
    remove_leftovers,
    replaced_checkpoints,
    staging_folder,
    step_folder,
    step_folders,
)
from polyad.parallel.checkpoint.save import commit
from tests.helpers.saving import save_tensors


def make(folder, steps, damaged):
    for step in steps:
        path = save_tensors(folder / f"step-{step:08d}", {"w": torch.ones(3)})
        if step in damaged:
            (path / "rank-00000.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("steps", "damaged", "step", "keep", "stay"),
    [
        pytest.param([3, 6, 9], [], 9, (None, 0), [3, 6, 9], id="all"),
        pytest.param([3, 6, 9], [], 9, (1, 0), [9], id="the newest"),
        pytest.param([3, 6, 9, 12], [], 12, (2, 0), [9, 12], id="two"),
        pytest.param([3, 6, 9, 12], [], 12, (2, 6), [6, 9, 12], id="and multiples for ever"),
        pytest.param([6, 12, 18], [], 18, (1, 6), [6, 12, 18], id="all are multiples"),
        pytest.param([3, 6, 9], [6], 9, (2, 0), [3, 9], id="a damaged one does not count"),
        pytest.param([3, 6, 9], [3, 6], 9, (2, 0), [9], id="nor do two"),
        # It was damaged, the run went on from 3 and has come to 6: the later one is not newer.
        pytest.param([3, 6, 9], [9], 6, (1, 0), [6, 9], id="a later one is of a run gone back"),
        pytest.param([3], [], 3, (1, 0), [3], id="the only one"),
        pytest.param([3, 6, 9, 12], [], 12, (1, 0, 6), [6, 12], id="and the best"),
        pytest.param([3, 6, 9], [], 9, (2, 0, 9), [6, 9], id="the newest is the best"),
        # One whose validation was cut short may turn out to be bad.
        pytest.param([3, 6, 9], [], 9, (1, 0, None, False), [6, 9], id="not judged"),
        pytest.param(
            [3, 6, 9], [6], 9, (1, 0, None, False), [3, 9], id="not judged, a damaged one"
        ),
    ],
)
def test_retention(tmp_path, steps, damaged, step, keep, stay):
    make(tmp_path, steps, damaged)
    prune(tmp_path, step, Retention(*keep))
    assert [path.name for path in complete_checkpoints(tmp_path)] == [
        f"step-{each:08d}" for each in stay
    ]
    assert len(list(tmp_path.iterdir())) == len(stay)  # nothing half removed


def test_the_best_is_named_as_long_as_it_is_kept(tmp_path):
    named = []
    for step, best in ((1, 1), (2, 1), (3, None), (4, 4), (5, 9)):
        staging = staging_folder(tmp_path, step)
        staging.mkdir(parents=True)
        commit(staging, step, [], {}, Retention(best=best))
        file = tmp_path / BEST_FILE
        named.append(file.read_text().strip() if file.exists() else None)
    assert named == [step_folder(1), step_folder(1), None, step_folder(4), None]


def test_steps_are_ordered_as_numbers(tmp_path):
    steps = [99_999_999, 100_000_000, 5]
    make(tmp_path, steps, [])
    assert [int(path.name[5:]) for path in step_folders(tmp_path)] == sorted(steps)


def test_a_replaced_checkpoint_is_put_back_unless_there_is_a_new_one(tmp_path):
    make(tmp_path, [3, 6], [])
    (tmp_path / "step-00000006").rename(tmp_path / ".step-00000006.replaced")
    shutil.copytree(tmp_path / "step-00000003", tmp_path / ".step-00000003.replaced")
    put_back(tmp_path)
    assert [path.name for path in complete_checkpoints(tmp_path)] == [
        "step-00000003",
        "step-00000006",
    ]
    assert [path.name for path in replaced_checkpoints(tmp_path)] == [".step-00000003.replaced"]
    remove_leftovers(tmp_path)
    assert not replaced_checkpoints(tmp_path)


def test_what_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, capfd):
    make(tmp_path, [3, 6], [])

    def busy(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(manage.os, "rmdir", busy)
    prune(tmp_path, 6, Retention(1))
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000006"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"polyad: warning: {tmp_path / 'step-00000003'}: could not be removed")
    remove_leftovers(tmp_path)
    assert "the next start of the run will try again" in capfd.readouterr().err
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def test_leftovers_of_crashes_go_and_nothing_else(tmp_path):
    make(tmp_path, [3], [])
    for name in (".step-00000006.1234abcd.partial", ".step-00000001.deleted"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "file").write_text("x")
    (tmp_path / ".step-00000006.1234abcd.partial" / "link").symlink_to(tmp_path / "step-00000003")
    (tmp_path / "notes").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000003"]
    assert (tmp_path / "step-00000003" / "manifest.json").is_file()  # the link was not followed
