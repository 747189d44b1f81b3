"""Checkpoints: what their files hold, what reads them, and what is refused."""

import shutil
from functools import cache

import pytest
import safetensors
import torch

from polyad.parallel.checkpoint.format import Box, CheckpointError
from polyad.parallel.checkpoint.load import Checkpoint, find_checkpoint
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.weights import load_model
from tests.helpers.everyday import everyday
from tests.helpers.training import global_batch, train
from tests.parallel.checkpoint.test_layouts import row

pytestmark = pytest.mark.distributed

KINDS = ("many words", "odd cp", "odd tr")


@pytest.fixture(scope="module")
def saved(workers, tmp_path_factory):
    """A checkpoint of some AdamW steps, by layout and kind."""

    @cache
    def save(layout, name="many words", steps=3):
        folder = tmp_path_factory.mktemp("saved")
        case, processes = row(name, layout, last_step=steps, save_to=str(folder))
        workers(processes).run(train, case)
        return folder / f"step-{steps:08}"

    return save


@everyday(
    ("name", "layout"),
    [
        *(("many words", each) for each in ("1", "2", "2 Z2", "2 Z3", "2 TP2", "4 TP2 Z3")),
        *(("smoe, all state", each) for each in ("4 EP2", "4 TP2 EP2", "4 EP4 Z2")),
    ],
    keep=[("many words", "2 Z2"), ("smoe, all state", "4 TP2 EP2")],
    ids=", ".join,
)
def test_every_number_is_written_once_and_by_all(saved, name, layout):
    checkpoint = Checkpoint(saved(layout, name))
    sizes: dict[str, list[int]] = {}
    for fields in checkpoint.tensors.values():
        for field, about in fields.items():
            covered = torch.zeros(about.shape, dtype=torch.int8)
            for chunk in about.chunks:
                box = zip(chunk.offset, chunk.size, strict=True)
                covered[tuple(slice(a, a + n) for a, n in box)] += 1
                if field not in ("random", "buffer"):
                    sizes.setdefault(chunk.file, []).append(torch.Size(chunk.size).numel())
            assert covered.eq(1).all(), field
    assert len(sizes) == int(layout[0])
    if name == "many words":
        per_file = [sum(each) for each in sizes.values()]
        assert max(per_file) < 1.1 * min(per_file)
    if layout in ("2", "2 Z2"):
        # Four fields; a range of a matrix is at most three boxes, and each process cuts one.
        most = 4 * (len(checkpoint.tensors) + 3 * len(sizes))
        assert sum(map(len, sizes.values())) <= most


def test_a_loaded_model_selects_as_many_as_training_did(saved):
    # K grows from 2 to 4 over 12 steps: 2, 3, 4 for a third of them each.
    for steps, selected in ((3, 2), (9, 4)):
        model = load_model(saved("2 EP2", "smoe, all state", steps))
        assert model.blocks[0].feed_forward.router.selection.top_k == selected


def test_files_are_safetensors_that_the_library_reads_and_text(saved):
    path = saved("2")
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json", ".yaml"}
    checkpoint, name = Checkpoint(path), "blocks.0.attention.qkv.weight"
    whole = checkpoint.whole(name, "exp_avg")
    for chunk in checkpoint.tensors[name]["exp_avg"].chunks:
        with safetensors.safe_open(path / chunk.file, framework="pt") as file:
            stored = file.get_tensor(f"{name}/exp_avg/{','.join(map(str, chunk.offset))}")
        box = zip(chunk.offset, chunk.size, strict=True)
        assert torch.equal(stored, whole[tuple(slice(a, a + n) for a, n in box)])


def test_readers_touch_only_the_bytes_they_ask_for(saved, monkeypatch):
    checkpoint = Checkpoint(saved("2 Z3"))
    opened = []
    original = Checkpoint._stored

    def record(self, about, chunk):
        opened.append(chunk)
        return original(self, about, chunk)

    monkeypatch.setattr(Checkpoint, "_stored", record)
    box = checkpoint.read(Box("token_embedding.weight", "master", (251, 36), (1, 2), (2, 3)))
    assert len(opened) == 1  # of the several chunks of that tensor
    assert len(checkpoint.tensors["token_embedding.weight"]["master"].chunks) > 1
    assert torch.equal(box, checkpoint.whole("token_embedding.weight")[1:3, 2:5])


@everyday("name", KINDS, keep=["many words"])
def test_load_model_gives_the_weights_on_one_device(workers, saved, name):
    path = saved("2 Z2", name)
    model = load_model(path)
    assert not model.training
    case, _ = row(name, "1", resume=str(path), first_step=3, last_step=4)
    expected = workers(1).run(train, case)[0]["losses"][0]
    batch = global_batch(3, case.model)
    with torch.no_grad():
        logits = model(batch[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_a_folder_without_manifest_is_no_checkpoint(saved, tmp_path):
    names = ("step-00000003", "step-00000009", ".step-00000010.partial")
    old, new, _ = (shutil.copytree(saved("2"), tmp_path / name) for name in names)
    (new / "manifest.json").unlink()
    assert complete_checkpoints(tmp_path) == [old]
    assert find_checkpoint(tmp_path) == old
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        Checkpoint(new)
