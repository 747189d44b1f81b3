"""Checkpoints: bitwise resume, any layout into any other, and what is refused."""

import itertools
import json
import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors
import torch

from polyad.model.families.keys import WeightsError
from polyad.parallel.checkpoint.format import Box, CheckpointError
from polyad.parallel.checkpoint.load import Checkpoint, find_checkpoint
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.weights import load_model
from tests.helpers import training
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_state
from tests.helpers.training import MODEL, global_batch, mumoe_model, resave, tensors, train

pytestmark = pytest.mark.distributed

# (processes, tensor-parallel ones, ZeRO stage)
DATA_PARALLEL = [(1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 1, 3)]
TENSOR_PARALLEL = [(n, 2, stage) for n in (2, 4) for stage in (1, 2, 3)]
LAYOUTS = DATA_PARALLEL + TENSOR_PARALLEL
ONE, TWO = (1, 1, 1), (2, 1, 1)
PAIRS = [
    *itertools.product(DATA_PARALLEL, DATA_PARALLEL),
    *((ONE, layout) for layout in TENSOR_PARALLEL),
    *((layout, TWO) for layout in TENSOR_PARALLEL),
    ((2, 2, 1), (4, 2, 3)),
    ((4, 2, 1), (2, 2, 2)),
]


# With more words than a part of a padded vocabulary has rows, so that each process has some.
DENSE = MODEL.model_copy(update={"vocab_size": 251})
Case = partial(training.Case, model=DENSE)
MODELS = {
    "dense": DENSE,
    "cp": mumoe_model(factorization="cp"),
    "tr": mumoe_model(factorization="tr", num_experts=[4, 3]),
}


def name(layout):
    world_size, tensor, stage = layout
    return f"TP {tensor} x DP {world_size // tensor} x ZeRO {stage}"


@pytest.fixture(scope="module")
def saved(workers, tmp_path_factory):
    """A checkpoint of three AdamW steps, and the losses of the next three, by layout."""
    made = {}

    def save(layout, precision="fp32", kind="dense"):
        if (layout, precision, kind) not in made:
            folder = tmp_path_factory.mktemp("saved")
            world_size, tensor, stage = layout
            case = Case(
                stage=stage, tensor=tensor, precision=precision, save_to=str(folder), last_step=3,
                model=MODELS[kind],
            )  # fmt: skip
            workers(world_size).run(train, case)
            made[layout, precision, kind] = folder / "step-00000003"
        return made[layout, precision, kind]

    return save


@everyday(
    ("kind", "layout", "precision"),
    [
        (kind, layout, precision)
        for kind in MODELS
        for layout in (LAYOUTS if kind == "dense" else DATA_PARALLEL)
        for precision in ("fp32", "bf16")
    ],
    keep=[],
    ids=lambda case: f"{case[0]} {name(case[1])}-{case[2]}",
)
def test_twelve_steps_equal_six_and_six_in_new_processes(
    workers, tmp_path, kind, layout, precision
):
    world_size, tensor, stage = layout
    case = Case(
        stage=stage, tensor=tensor, precision=precision, dropout=0.1, learning_rate=1e-3,
        model=MODELS[kind],
    )  # fmt: skip
    pool = workers(world_size)
    whole = pool.run(train, case.but(last_step=12, save_to=str(tmp_path / "whole")))[0]
    first = pool.run(train, case.but(last_step=6, save_to=str(tmp_path / "half")))[0]
    pool.stop()  # the next call starts new processes
    middle = str(tmp_path / "half" / "step-00000006")
    rest = case.but(first_step=6, last_step=12, resume=middle, save_to=str(tmp_path / "rest"))
    second = pool.run(train, rest)[0]
    assert first["losses"] + second["losses"] == whole["losses"]
    expected = tensors(tmp_path / "whole" / "step-00000012")
    actual = tensors(tmp_path / "rest" / "step-00000012")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@everyday(
    ("kind", "origin", "target"),
    [
        *(("dense", *pair) for pair in PAIRS),
        *itertools.product(("cp", "tr"), DATA_PARALLEL, DATA_PARALLEL),
    ],
    keep=[("cp", (2, 1, 3), TWO)],
    ids=lambda case: f"{case[0]} {name(case[1])} to {name(case[2])}",
)
def test_any_layout_saves_again_what_any_other_wrote(
    workers, saved, tmp_path, kind, origin, target
):
    path = saved(origin, kind=kind)
    world_size, tensor, stage = target
    case = Case(
        stage=stage, tensor=tensor, resume=str(path), first_step=3, save_to=str(tmp_path),
        model=MODELS[kind],
    )  # fmt: skip
    workers(world_size).run(resave, case)
    assert_equal_state(tmp_path / "step-00000003", path)
    assert steps(path) == steps(tmp_path / "step-00000003") == {3.0}


@everyday("target", LAYOUTS, keep=[ONE, (4, 2, 3)], ids=name)
def test_bf16_checkpoints_keep_fp32_masters_across_layouts(workers, saved, tmp_path, target):
    path = saved((2, 1, 1), "bf16")
    world_size, tensor, stage = target
    case = Case(
        stage=stage,
        tensor=tensor,
        precision="bf16",
        resume=str(path),
        first_step=3,
        save_to=str(tmp_path),
    )
    workers(world_size).run(resave, case)
    assert_equal_state(tmp_path / "step-00000003", path)
    weight = tensors(path)["token_embedding.weight", "master"]
    assert not torch.equal(weight, weight.bfloat16().float())


@everyday("target", LAYOUTS, keep=[(4, 2, 3)], ids=name)
def test_training_goes_on_alike_on_every_layout(workers, saved, target):
    path = saved((2, 1, 2))
    case = Case(resume=str(path), first_step=3, last_step=6)
    expected = workers(2).run(train, case.but(stage=2))[0]["losses"]
    world_size, tensor, stage = target
    actual = workers(world_size).run(train, case.but(stage=stage, tensor=tensor))[0]["losses"]
    assert torch.allclose(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=0)


@everyday("layout", LAYOUTS, keep=[(2, 2, 1), (4, 2, 3)], ids=name)
def test_every_byte_is_written_once_and_by_all(saved, layout):
    checkpoint = Checkpoint(saved(layout))
    per_file: dict[str, int] = {}
    for fields in checkpoint.tensors.values():
        for field, about in fields.items():
            covered = torch.zeros(about.shape, dtype=torch.int8)
            for chunk in about.chunks:
                box = zip(chunk.offset, chunk.size, strict=True)
                covered[tuple(slice(a, a + n) for a, n in box)] += 1
                if field != "random":
                    size = torch.Size(chunk.size).numel()
                    per_file[chunk.file] = per_file.get(chunk.file, 0) + size
            assert covered.eq(1).all()
    assert len(per_file) == layout[0]
    assert max(per_file.values()) < 1.1 * min(per_file.values())


def test_files_are_safetensors_that_the_library_reads(saved):
    path = saved((2, 1, 1))
    checkpoint = Checkpoint(path)
    about = checkpoint.tensors["blocks.0.attention.qkv.weight"]["exp_avg"]
    whole = checkpoint.whole("blocks.0.attention.qkv.weight", "exp_avg")
    for chunk in about.chunks:
        with safetensors.safe_open(path / chunk.file, framework="pt") as file:
            offset = ",".join(map(str, chunk.offset))
            stored = file.get_tensor(f"blocks.0.attention.qkv.weight/exp_avg/{offset}")
        box = zip(chunk.offset, chunk.size, strict=True)
        assert torch.equal(stored, whole[tuple(slice(a, a + n) for a, n in box)])


def test_readers_touch_only_the_bytes_they_ask_for(saved, monkeypatch):
    checkpoint = Checkpoint(saved((2, 1, 3)))
    opened = []
    original = Checkpoint._stored

    def record(self, about, chunk):
        opened.append(chunk)
        return original(self, about, chunk)

    monkeypatch.setattr(Checkpoint, "_stored", record)
    shape = (DENSE.vocab_size, DENSE.hidden_size)
    box = checkpoint.read(Box("token_embedding.weight", "master", shape, (1, 2), (2, 3)))
    assert len(opened) == 1  # of the several chunks of that tensor
    assert len(checkpoint.tensors["token_embedding.weight"]["master"].chunks) > 1
    assert torch.equal(box, checkpoint.whole("token_embedding.weight")[1:3, 2:5])


@everyday("kind", MODELS, keep=["dense"])
def test_load_model_gives_the_weights_on_one_device(workers, saved, kind):
    path = saved((2, 1, 3), kind=kind)
    model = load_model(path)
    assert not model.training
    case = Case(resume=str(path), first_step=3, last_step=4, model=MODELS[kind])
    expected = workers(1).run(train, case)[0]["losses"][0]
    batch = global_batch(3, MODELS[kind])
    with torch.no_grad():
        logits = model(batch[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def copy(path: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for file in path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_folder_without_manifest_is_no_checkpoint(saved, tmp_path):
    old = copy(saved((2, 1, 1)), tmp_path / "step-00000003")
    new = copy(saved((2, 1, 1)), tmp_path / "step-00000009")
    (new / "manifest.json").unlink()
    copy(saved((2, 1, 1)), tmp_path / ".step-00000010.partial")
    assert complete_checkpoints(tmp_path) == [old]
    assert find_checkpoint(tmp_path) == old
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        Checkpoint(new)


@pytest.mark.parametrize("layout", [ONE, TWO])
def test_a_flipped_byte_in_a_shard_is_refused_by_name(saved, tmp_path, layout):
    path = copy(saved(layout), tmp_path / "step-00000003")
    shard = path / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    chunk = Checkpoint(path).tensors["token_embedding.weight"]["master"].chunks[0]
    data[chunk.begin + 5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: damaged: its xxh3 differs"):
        load_model(path)


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def other_content(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    *((name, flip) for name in ("index.json", "state.json", "config.yaml")),
    *((name, shorten) for name in ("rank-00001.safetensors", "index.json", "state.json")),
    *((name, Path.unlink) for name in ("rank-00001.safetensors", "index.json", "state.json")),
    *(
        ("manifest.json", other_content(content))
        for content in (b"[]", b"{}", b"\xff", b"", b'{"format": "other", "version": 1}')
    ),
]


@pytest.mark.parametrize(("name", "change"), DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_or_missing_file_is_named(saved, tmp_path, name, change):
    path = copy(saved((2, 1, 1)), tmp_path / "step-00000003")
    change(path / name)
    with pytest.raises(CheckpointError, match=re.escape(name)) as caught:
        Checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_refused(saved, tmp_path):
    path = copy(saved((2, 1, 1)), tmp_path / "step-00000003")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(CheckpointError, match="version 99 is newer"):
        Checkpoint(path)


def test_another_model_is_refused_with_the_differing_names(saved):
    from polyad.model.build import build_model

    other = build_model(DENSE.model_copy(update={"num_layers": 3}))
    with pytest.raises(WeightsError, match=r"a different model: blocks\.2.* missing there"):
        Checkpoint(saved((2, 1, 1))).check_model(other)


def test_no_file_holds_a_pickle(saved):
    for file in saved((2, 1, 1)).iterdir():
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", data[:8])
            json.loads(data[8 : 8 + length])
        else:
            assert file.suffix in {".json", ".yaml"}


def test_missing_folder_is_named():
    with pytest.raises(CheckpointError, match="nowhere: there is no such folder"):
        find_checkpoint(Path("nowhere"))


def steps(path):
    checkpoint = Checkpoint(path)
    return {
        chunk.step
        for fields in checkpoint.tensors.values()
        for field, about in fields.items()
        if field != "random"
        for chunk in about.chunks
    }
