"""Folders of weights made of symbolic links."""

import shutil

import pytest
import torch

from polyad.parallel.weights import load_model
from tests.helpers.resealed import said

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("kind", ["theirs", "ours"])
def test_links_out_of_a_folder_of_weights_are_refused(exported, plain, tmp_path, capfd, kind):
    folder = tmp_path / "folder"
    shutil.copytree(exported if kind == "theirs" else plain("dense"), folder)
    for path in sorted(folder.iterdir()):
        outside = tmp_path / path.name
        path.rename(outside)
        path.symlink_to(outside)
        line = said(["generate", folder, "--prompt", "x"], capfd)
        assert line.startswith(f"{path}: is a symbolic link that leaves the folder"), line
        path.unlink()
        outside.rename(path)


def test_a_snapshot_of_the_hub_is_made_of_links(exported, tmp_path):
    """`snapshots/REVISION` holds links to `blobs` beside it, and nowhere else."""
    repository = tmp_path / "models--gpt2"
    snapshot = repository / "snapshots" / "607a30d"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(exported.iterdir())):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    expected = dict(load_model(exported).named_parameters())
    for name, value in load_model(snapshot).named_parameters():
        assert torch.equal(value, expected[name])
