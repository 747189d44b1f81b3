"""A Hugging Face folder as a source of weights: boxes, layouts, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyad.model.build import read_model_config
from polyad.model.decoder import GPT2Config
from polyad.model.families.keys import WeightsError
from polyad.parallel.checkpoint.format import MASTER, Box
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import load_model
from tests.helpers.reference import save_reference
from tests.helpers.refusals import line_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("theirs")
    save_reference(path)
    return path


def rewrite(folder, target, change):
    """A copy of the folder with its tensors changed."""
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(change(load_file(folder / "model.safetensors")), target / "model.safetensors")
    return target


BUFFERS = {
    "transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32),
    "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
}


@pytest.mark.parametrize("form", ["saved", "sharded", "untied", "no prefix", "head", "buffers"])
def test_logits_equal_transformers_in_every_form_of_file(folder, tmp_path, form):
    if form == "saved":
        reference, path = save_reference(tmp_path), tmp_path
    elif form == "untied":
        reference, path = save_reference(tmp_path, tie_word_embeddings=False), tmp_path
        assert not torch.equal(reference.lm_head.weight, reference.transformer.wte.weight)
    elif form == "sharded":
        reference, path = save_reference(tmp_path, shard_size="20KB"), tmp_path
        assert len(list(path.glob("*.safetensors"))) > 2
    else:
        change = {
            "no prefix": lambda t: {
                n.removeprefix("transformer."): value for n, value in t.items()
            },
            "head": lambda t: t | {"lm_head.weight": t["transformer.wte.weight"].clone()},
            "buffers": lambda t: t | BUFFERS,
        }[form]
        reference, path = save_reference(tmp_path / "x"), rewrite(folder, tmp_path, change)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected, logits = reference(ids).logits, load_model(path)(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_any_box_is_the_box_of_the_whole(folder):
    weights = FamilyWeights(folder)
    tensors = load_file(folder / "model.safetensors")
    name, shape = "blocks.1.attention.qkv.weight", (96, 32)
    whole = tensors["transformer.h.1.attn.c_attn.weight"].T
    assert torch.equal(weights.whole(name), whole)
    for offset, size in (
        ((0, 0), (96, 32)),
        ((5, 3), (1, 7)),
        ((90, 0), (6, 32)),
        ((0, 31), (9, 1)),
    ):
        box = weights.read(Box(name, MASTER, shape, offset, size))
        (a, b), (n, m) = offset, size
        assert torch.equal(box, whole[a : a + n, b : b + m])
    bias = weights.read(Box("final_norm.bias", MASTER, (32,), (4,), (5,)))
    assert torch.equal(bias, tensors["transformer.ln_f.bias"][4:9])
    assert torch.equal(weights.read(Box(name, "exp_avg", shape, (0, 0), (2, 2))), torch.zeros(2, 2))
    assert weights.step(name) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_exact_fp32(folder, tmp_path, dtype):
    rewrite(folder, tmp_path, lambda t: {name: x.to(dtype) for name, x in t.items()})
    weights = FamilyWeights(tmp_path)
    expected = load_file(folder / "model.safetensors")["transformer.wte.weight"].to(dtype).float()
    assert torch.equal(weights.whole("token_embedding.weight"), expected)


def test_an_index_of_shards_that_are_gone_is_not_read_beside_a_whole_file(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path)
    index = {"weight_map": {"transformer.wte.weight": "model-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ours, theirs = FamilyWeights(tmp_path), FamilyWeights(folder)
    assert torch.equal(ours.whole("token_embedding.weight"), theirs.whole("token_embedding.weight"))


def test_files_that_cannot_be_read_are_refused_by_name(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    refused(tmp_path, "neither model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    refused(tmp_path, "pytorch_model.bin, a pickle", "safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\x09\0\0\0\0\0\0\0nonsense")
    refused(tmp_path, "model.safetensors: is damaged")
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    refused(tmp_path, "model.safetensors: is damaged")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path, "model.safetensors.index.json: weight_map: ")
    index = {"weight_map": {"transformer.wte.weight": "model-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path, "model-00001.safetensors: ")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json: is not JSON")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "config.json: is not a JSON object")
    twice = rewrite(folder, tmp_path / "x", lambda t: t | {"wte.weight": torch.ones(400, 32)})
    refused(twice, "wte.weight", "appears twice")


def test_a_head_with_the_nan_of_its_embedding_is_tied(folder, tmp_path):
    def spoil(tensors):
        embedding = tensors["transformer.wte.weight"].clone()
        embedding[3, 4] = torch.nan
        tied = {"transformer.wte.weight": embedding, "lm_head.weight": embedding.clone()}
        return tensors | tied

    weights = FamilyWeights(rewrite(folder, tmp_path, spoil))
    assert weights.whole("token_embedding.weight").isnan().sum() == 1


def refused(folder, *words):
    line = line_of(WeightsError, FamilyWeights, folder)
    assert all(word in line for word in words), line


def test_a_configuration_of_another_model_is_refused_by_key(folder):
    weights = FamilyWeights(folder)
    same = weights.config.model_copy(update={"dropout": 0.5, "recompute": "block"})
    weights.check_config(same)
    gpt2 = same.model_dump()
    for update, word in [
        ({"num_heads": 2}, "model.num_heads 4 there, 2 here"),
        ({"bias": False}, "model.bias True there, False here"),
        ({"feed_forward": {"kind": "smoe"}}, "feed_forward.kind 'dense' there, 'smoe' here"),
        ({"feed_forward": {"hidden_size": 8}}, "model.feed_forward.hidden_size 128 there, 8"),
    ]:
        with pytest.raises(WeightsError, match=word):
            weights.check_config(GPT2Config.model_validate(gpt2 | update))
    with pytest.raises(WeightsError, match=r"model\.kind 'gpt2' there, 'mixer' here"):
        weights.check_config(read_model_config({"kind": "mixer"}))
