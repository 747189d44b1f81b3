"""Llama-style decoders of transformers and their mixtures, opened here."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from polyad.model.build import read_model_config
from polyad.model.families.decoders import DECODERS
from polyad.model.families.family import Known
from polyad.model.families.keys import WeightsError
from polyad.model.families.registry import family_of_model
from polyad.model.output import ask_for_statistics
from polyad.model.smoe.router import Selected, spread
from polyad.parallel.families import FamilyWeights
from polyad.parallel.tensor_folder import TensorFolder
from polyad.train.exchange.convert import convert
from polyad.train.loop.losses import LossConfig, routing_loss
from tests.helpers.decoders import (
    CASES,
    ROUTED,
    WORDS,
    Choices,
    Chosen,
    InDouble,
    in_double,
    opened,
    theirs,
    tokens,
)
from tests.helpers.everyday import everyday
from tests.helpers.routing import assert_causal

pytest.importorskip("transformers")
every_case = everyday(
    "case",
    list(CASES),
    keep=["llama 3", "olmoe", "qwen3_moe", "granitemoeshared", "deepseek_v3 yarn", "gpt_oss odd"],
)

OWN = {
    "kind": "smoe",
    "num_experts": 4,
    "expert_hidden_size": 24,
    "activation": "swiglu",
    "combine": "sum_to_one",
    "router_dtype": "model",
}


def assert_same_choices(ours, of_theirs):
    assert len(ours.ids) == len(of_theirs.ids)
    for a, b in zip(ours.ids, of_theirs.ids, strict=True):
        assert torch.equal(a.sort(-1).values, b.view_as(a).sort(-1).values)


@pytest.mark.parametrize("case", CASES)
@everyday("fused", [False, True], keep=[False], ids=["per expert", "fused"])
def test_logits_are_those_of_transformers(case, fused, tmp_path):
    model = theirs(case)
    model.save_pretrained(tmp_path, save_original_format=not fused)
    ours = opened(tmp_path)
    chosen, selected = Chosen(model), Choices(ours)
    with torch.no_grad():
        wanted, found = model(tokens()).logits, ours(tokens()).logits
    assert (wanted - found).abs().max() < 1e-5
    assert wanted.abs().max() > 0.5
    assert (case in ROUTED) == bool(selected.ids)
    assert_same_choices(selected, chosen)


@pytest.mark.parametrize("case", CASES)
def test_no_token_sees_a_later_one(case, tmp_path):
    theirs(case).save_pretrained(tmp_path)
    model, ids_BT = opened(tmp_path, torch.float64), tokens()
    assert model.config.vocab_size == WORDS
    for last in (0, 8, 21):
        assert_causal(model, ids_BT, last)


@every_case
def test_gradients_in_float64_are_those_of_transformers(case, tmp_path):
    error, gradients = in_double(case, tmp_path)
    assert error < 1e-12
    for name, ours, wanted in gradients:
        assert (ours - wanted).abs().max() < 1e-7 * max(1, wanted.abs().max()), name
        assert wanted.abs().max() > 0 or "bias" in name, name


@everyday("case", ROUTED, keep=["olmoe", "deepseek_v3 yarn", "gpt_oss odd"])
def test_a_router_in_bf16_chooses_what_that_of_transformers_chooses(case, tmp_path):
    model = theirs(case, torch.bfloat16)
    model.save_pretrained(tmp_path)
    ours, chosen, ids = opened(tmp_path, torch.bfloat16), Chosen(model), tokens(200, 8)
    with torch.no_grad():
        model(ids)
        routers = [
            block.feed_forward.router
            for block in ours.blocks
            if hasattr(block.feed_forward, "router")
        ]
        for number, router in enumerate(routers):
            found = router(chosen.inputs[number].view(*ids.shape, -1))[0]
            wanted = Selected.of(
                chosen.weights[number], chosen.ids[number], router.selection.num_experts
            )
            ours_NE, theirs_NE = (
                spread(each, router.selection.num_experts) for each in (found, wanted)
            )
            assert torch.equal(ours_NE != 0, theirs_NE != 0), number
            # Theirs are rounded to bf16, but for Mixtral's and DeepSeek's.
            torch.testing.assert_close(ours_NE, theirs_NE.float(), rtol=2**-7, atol=0)
    assert len(routers) == len(chosen.ids) > 0


@every_case
def test_bf16_is_as_near_to_the_truth_as_transformers(case, tmp_path):
    model = theirs(case, torch.bfloat16)
    model.save_pretrained(tmp_path)
    ours, ids = opened(tmp_path, torch.bfloat16), tokens(60, 16)
    with torch.no_grad():
        wanted, found = model(ids).logits.float(), ours(ids).logits.float()
    exact = theirs(case, torch.float64)
    with torch.no_grad(), InDouble():
        true = exact(ids, use_cache=False).logits
    # The median: a few tokens of either have other experts, and chance decides how far off.
    error = (wanted - true).abs().median()
    assert (found - true).abs().median() < 1.05 * error


WITH_LOSS = [name for name in ROUTED if not name.startswith("deepseek")]


@everyday("case", WITH_LOSS, keep=["qwen2_moe"])
def test_the_loss_over_all_layers_is_the_auxiliary_loss_of_transformers(case, tmp_path):
    theirs(case).save_pretrained(tmp_path)
    model = theirs(case, torch.float64)
    ours, ids = opened(tmp_path, torch.float64).train(), tokens()
    ask_for_statistics(ours, losses=frozenset({"usage_E"}), samples=False)
    with InDouble():
        wanted = model(ids, use_cache=False, output_router_logits=True).aux_loss
    routing = ours(ids).routing
    config = LossConfig(load_balance=model.config.num_experts_per_tok, load_balance_over="model")
    found = routing_loss(routing, config)
    assert len(routing) > 1
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    for each in (found, wanted):
        each.backward()
    embedding = model.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours.token_embedding.weight.grad, embedding, rtol=1e-9, atol=1e-12)
    assert embedding.abs().max() > 1e-6


NEEDED = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _ in CASES.values()))
def test_keys_that_a_file_does_not_have_have_the_librarys_defaults(kind):
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[kind]().to_dict()
    # Of an expert's width there is no default here, and DeepSeek-V2 has none of experts a token.
    width = "moe_intermediate_size" if "moe_intermediate_size" in whole else "intermediate_size"
    needed = (*NEEDED, width)
    if kind == "deepseek_v2":
        whole["num_experts_per_tok"] = 6
        needed = (*needed, "num_experts_per_tok")
    family = next(each for each in DECODERS if each.is_of(whole))
    least = {key: whole[key] for key in needed}
    expected, found = (
        family.read_config(tree, lambda name: None, "config.json").filled()
        for tree in (whole, least)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("case", "said", "other"),
    [
        ("qwen3", {"use_qk_norm": True}, {"use_qk_norm": False}),
        ("qwen3_moe", {"use_qk_norm": True}, {"use_qk_norm": False}),
        ("olmoe", {"use_qk_norm": True}, {"use_qk_norm": False}),
        ("mixtral", {"norm_topk_prob": True}, {"norm_topk_prob": False}),
        ("gpt_oss", {"norm_topk_prob": True}, {"norm_topk_prob": False}),
        ("granitemoe", {"position_embedding_type": "rope"}, {"position_embedding_type": "nope"}),
        ("granitemoeshared", {"normalization_function": "rmsnorm"},
         {"normalization_function": "layernorm"}),
        ("qwen2", {"attention_bias": True, "qkv_bias": True}, {"use_qk_norm": True}),
        ("llama", {"max_sequence_length": 64, "unsloth_version": "2025.1"}, {"use_qk_norm": True}),
    ],
)  # fmt: skip
def test_a_key_that_says_what_the_family_does_is_accepted(case, said, other, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs(case).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    tree = json.loads(config.read_text())
    config.write_text(json.dumps(tree | said | dict.fromkeys(other)))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).eval()
    with torch.no_grad():
        wanted = reference(tokens()).logits
        assert (opened(tmp_path)(tokens()).logits - wanted).abs().max() < 2e-5 * wanted.abs().max()
    config.write_text(json.dumps(tree | other))
    [(key, value)] = other.items()
    with pytest.raises(WeightsError, match=f"{key}: {value!r} is not supported"):
        FamilyWeights(tmp_path)


@every_case
@pytest.mark.parametrize(("dtype", "fused"), [(torch.bfloat16, False), (torch.float32, True)])
def test_a_folder_comes_back_byte_by_byte(case, dtype, fused, tmp_path):
    theirs(case, dtype).save_pretrained(tmp_path / "a", save_original_format=not fused)
    convert(tmp_path / "a", tmp_path / "b", to="polyad")
    convert(tmp_path / "b", tmp_path / "c", to="huggingface")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in "ac")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor)
    a, c = (json.loads((tmp_path / each / "config.json").read_text()) for each in "ac")
    assert a == c


@every_case
def test_a_model_of_ones_own_is_written_for_transformers(case, tmp_path):
    """Without the config.json that it is from: all keys are ours."""
    from transformers import AutoModelForCausalLM

    theirs(case).save_pretrained(tmp_path / "a")
    weights = FamilyWeights(tmp_path / "a")
    family = family_of_model(weights.config)
    tree = family.write_config(weights.config, Known())
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_text(json.dumps(tree))
    shutil.copy(tmp_path / "a/model.safetensors", tmp_path / "b")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", attn_implementation="eager" if case.startswith("gpt_oss") else "sdpa"
    )
    with torch.no_grad():
        wanted = opened(tmp_path / "a")(tokens()).logits
        assert (model(tokens()).logits - wanted).abs().max() < 1e-5


def test_four_bits_of_gpt_oss_are_those_of_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(110, 140, (2, 6, 3), generator=generator).to(torch.uint8)
    scales[0, 0], scales[1, 1], scales[1, 2] = 0, 254, 255
    save_file({"m_blocks": blocks, "m_scales": scales}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    assert folder.keys() == {"m"}
    wanted = convert_moe_packed_tensors(blocks, scales)
    assert folder["m"].shape == tuple(wanted.shape)
    found = folder["m"].read((slice(0, 2), slice(0, 96), slice(0, 6)))
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    part = folder["m"].read((slice(1, 2), slice(5, 40), slice(1, 6, 2)))
    assert torch.equal(part, wanted[1:2, 5:40, 1:6:2])


def test_a_file_that_is_larger_than_memory_is_opened(tmp_path):
    size = 4 * (psutil.virtual_memory().total + psutil.swap_memory().total) // 10**6 * 10**6
    header = json.dumps({
        "__metadata__": {"format": "pt"},
        "first": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]},
        "last": {"dtype": "F32", "shape": [2, 3], "data_offsets": [size, size + 24]},
        "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [size + 24, size + 24]},
    }).encode()  # fmt: skip
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(size, os.SEEK_CUR)  # a hole, which takes no room
        file.write(np.arange(6, dtype=np.float32).tobytes())
    folder = TensorFolder(tmp_path)
    assert torch.equal(folder["last"].read((slice(1, 2),)), torch.tensor([[3.0, 4, 5]]))
    assert folder["first"].read((slice(size // 2 - 1, None),)).tolist() == [0]
    assert folder["none"].read((slice(None),)).shape == (0, 3)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert folder["first"].shape == (size // 2,)


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ({"query_key_norm": "head", "feed_forward": OWN}, "transformers' Qwen3-MoE"),
        ({"query_key_norm": "all", "head_size": 8, "feed_forward": OWN}, "transformers' OLMoE"),
        ({"feed_forward": OWN}, "transformers' Mixtral"),
        ({"feed_forward": OWN | {"graph": "similarity"}}, None),
        ({"feed_forward": OWN | {"balancing_rate": 0.001}}, None),
        ({}, "transformers' Llama"),
        ({"attention_sinks": True}, None),
    ],
)
def test_the_family_of_a_model_of_ones_own_is_found(model, title):
    sizes = {"kind": "decoder", "hidden_size": 32, "num_heads": 4, "num_layers": 2}
    config = read_model_config(sizes | {"vocab_size": 61, "sequence_length": 16} | model)
    if title is not None:
        assert family_of_model(config).title == title
        return
    with pytest.raises(WeightsError, match=r"transformers has no such architecture: .* has model"):
        family_of_model(config)
