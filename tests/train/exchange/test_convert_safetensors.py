"""Weights to safetensors with our names and back: bitwise, and every fault one line."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyad.parallel.checkpoint.format import MASTER
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from tests.helpers.everyday import everyday
from tests.helpers.runs import FEED_FORWARDS, newest
from tests.helpers.training import tensors

pytestmark = pytest.mark.distributed


@everyday("kind", FEED_FORWARDS, keep=["smoe", "tr"])
def test_polyad_to_safetensors_to_polyad_to_safetensors_is_bitwise(trained, plain, tmp_path, kind):
    original = Checkpoint(newest(trained(kind)))
    stored = load_file(plain(kind) / "model.safetensors")
    buffers = {name for name, fields in original.tensors.items() if "buffer" in fields}
    assert bool(buffers) == (kind in ("smoe", "emoe"))  # a balancing bias; places of units
    assert stored.keys() == original.shapes().keys() | buffers
    for name, value in stored.items():
        field = "buffer" if name in buffers else MASTER
        assert torch.equal(value, original.whole(name, field)), name
    files = {path.name for path in plain(kind).iterdir()}
    assert files == {"config.yaml", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    result = convert(plain(kind), tmp_path / "back", "polyad")
    assert (result["notes"], result["tokenizer"]) == ([], True)
    before, after = tensors(newest(trained(kind))), tensors(tmp_path / "back")
    assert after.keys() == {key for key in before if key[1] in {MASTER, "buffer"}}
    assert all(torch.equal(after[key], before[key]) for key in after)
    back = Checkpoint(tmp_path / "back")
    assert back.model_config() == original.model_config()
    assert back.state.tokenizer_fingerprint == original.state.tokenizer_fingerprint
    ids = torch.randint(400, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = (load_model(path)(ids).logits for path in (trained(kind), plain(kind)))
    assert torch.equal(logits, expected)
    convert(tmp_path / "back", tmp_path / "again", "safetensors")
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (plain(kind) / name).read_bytes()


def retensored(change):
    def apply(folder):
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path)

    return apply


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def rewritten(old, new):
    def apply(folder):
        text = (folder / "config.yaml").read_text()
        assert old in text
        (folder / "config.yaml").write_text(text.replace(old, new))

    return apply


GATE = "blocks.1.feed_forward.gate.weight"
WIDE = f"hidden_size: {2**31 - 4}\n  num_heads"
FAULTS = [
    (lambda f: (f / "config.yaml").unlink(), "config.yaml: "),
    (lambda f: (f / "config.yaml").write_text("a: [\n"), "config.yaml: "),
    (lambda f: (f / "config.yaml").write_text("x: 1"), "has no section `model`"),
    (rewritten("num_heads: 4", "num_heads: many"), "model.num_heads: "),
    (rewritten("vocab_size: 400", "vocab_size: null"), "model.vocab_size: is missing"),
    (rewritten("num_layers: 2", "num_layers: 3"), "no tensor blocks.2."),
    (rewritten("hidden_size: 32\n  num_heads", WIDE), "config.yaml: "),
    (retensored(lambda t: {n: v for n, v in t.items() if n != GATE}), f"no tensor {GATE}"),
    (retensored(lambda t: t | {"new": torch.ones(1)}), "unknown tensor new"),
    (
        retensored(lambda t: t | {GATE: torch.ones(15, 32)}),
        f"{GATE} is [15, 32], config.yaml says [16, 32]",
    ),
    (retensored(lambda t: t | {GATE: t[GATE].long()}), f"{GATE} is I64, allowed: F32, F16, BF16"),
    (cut, "model.safetensors: is damaged"),
]


@pytest.mark.parametrize(("change", "part"), FAULTS)
def test_a_folder_of_safetensors_with_a_fault_is_one_line(plain, tmp_path, refused, change, part):
    folder = tmp_path / "plain"
    shutil.copytree(plain("cp"), folder)
    change(folder)
    line = refused("convert", folder, tmp_path / "new", "--to", "polyad")
    assert str(folder) in line
    assert part in line
    assert list(tmp_path.iterdir()) == [folder]
