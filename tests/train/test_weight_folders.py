"""Folders of weights made of symbolic links."""

import shutil

import pytest
import torch

from polyad.parallel.weights import load_model

pytestmark = pytest.mark.distributed


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
