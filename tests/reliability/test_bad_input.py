"""Checkpoints that are whole but of no use here, and disks without room: one line, status 2."""

import json
import pickle
import shutil

import pytest
import torch

from polyad.model.build import build_model
from polyad.model.families.keys import WeightsError
from polyad.parallel.checkpoint.format import CheckpointError, verify_contents
from polyad.parallel.checkpoint.load import Checkpoint, newest_that_opens
from polyad.parallel.weights import load_model
from tests.helpers.runs import reseal
from tests.helpers.saving import save_tensors
from tests.helpers.training import MODEL, Case, model_yaml


def write(folder, *, without=(), other_shape=(), step="step-00000001"):
    """A checkpoint of the tiny model, but for some weights."""
    shapes = {name: p.shape for name, p in build_model(MODEL).named_parameters()}
    shapes |= {name: (*shapes[name][:-1], shapes[name][-1] + 1) for name in other_shape}
    ones = {name: torch.ones(shape) for name, shape in shapes.items() if name not in without}
    return save_tensors(folder / step, ones, model_yaml(Case()))


DOWN = "blocks.1.feed_forward.down.weight"


@pytest.mark.parametrize(
    ("saved", "model", "words"),
    [
        ({"without": [DOWN]}, {}, rf"{DOWN} missing there, \[36"),
        ({"other_shape": ["final_norm.weight"]}, {}, r"final_norm\.weight \[37\] there"),
        # Of 12 in a block, and the positions.
        ({}, {"num_layers": 3, "sequence_length": 9}, r"blocks\.2\.attention.* and 10 more"),
    ],
)
def test_another_model_is_refused_by_its_first_weights(tmp_path, saved, model, words):
    path = write(tmp_path, **saved)
    with pytest.raises(WeightsError, match=words):
        Checkpoint(path).check_model(build_model(MODEL.model_copy(update=model)))
    if saved:
        with pytest.raises(WeightsError, match=words):
            load_model(path)


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path, refused):
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "folder").mkdir()
    for name, words in (
        ("model.pt", "is a file; a checkpoint is a folder"),
        ("folder", "holds no complete checkpoint"),
    ):
        assert words in refused("generate", tmp_path / name, "--prompt", "x")


@pytest.mark.parametrize("content", [b"", pickle.dumps([*range(500)])], ids=["none", "pickle"])
def test_a_shard_that_is_too_short_is_refused_though_its_digest_is_right(tmp_path, content):
    path = write(tmp_path)
    (path / "rank-00000.safetensors").write_bytes(content)
    reseal(path)
    verify_contents(path)
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: damaged: cannot be read"):
        load_model(path)


@pytest.mark.parametrize(("version", "words"), [(2, "2 is older than 3"), (4, "4 is newer than 3")])
def test_another_version_is_refused_and_no_older_checkpoint_is_taken(tmp_path, version, words):
    write(tmp_path)
    newer = write(tmp_path, step="step-00000002")
    tree = json.loads((newer / "manifest.json").read_text()) | {"version": version}
    (newer / "manifest.json").write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=words):
        newest_that_opens(tmp_path)
    shutil.rmtree(newer)
    assert newest_that_opens(tmp_path).folder.name == "step-00000001"
