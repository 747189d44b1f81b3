"""Folders whose tensors do not match config.json are refused before anything is computed."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyad.data.errors import DataError
from polyad.data.images.augmentation import transforms
from polyad.model.families.keys import WeightsError
from polyad.parallel.families import FamilyWeights
from tests.helpers.bert import their_bert
from tests.helpers.decoders import CASES, in_four_bits, theirs
from tests.helpers.everyday import everyday
from tests.helpers.reference import save_reference
from tests.helpers.refusals import line_of

transformers = pytest.importorskip("transformers")
FUSED, FOUR_BITS = "olmoe, fused", "gpt_oss, 4 bits"
OTHERS = ["gpt2", "bert", "vit", FUSED, FOUR_BITS]
KEPT = ["deepseek_v3", "bert", FUSED, FOUR_BITS]
DTYPES = (torch.int64, torch.float8_e4m3fn, torch.float64, torch.float32)


def written(case: str, folder: Path) -> None:
    """Writes a tiny random folder of a family."""
    if case == "gpt2":
        save_reference(folder)
    elif case == "bert":
        their_bert("BertForMaskedLM").save_pretrained(folder)
    elif case == "vit":
        with contextlib.suppress(DataError):
            transforms()  # where torchvision is installed, transformers needs its door
        config = transformers.ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=40, image_size=16, patch_size=4, num_labels=5)  # fmt: skip
        transformers.ViTForImageClassification(config).save_pretrained(folder)
    elif case == FUSED:
        theirs("olmoe", num_hidden_layers=2).save_pretrained(folder, save_original_format=False)
    elif case == FOUR_BITS:
        settings = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
        theirs("gpt_oss", **settings).save_pretrained(folder)
        in_four_bits(folder)
    else:
        theirs(case).save_pretrained(folder)


def altered(tensor):
    """Yields what a tensor is not: other sizes, axes and dtypes."""
    for axis, size in enumerate(tensor.shape):
        for other in {0, size - 1, size + 1} - {size}:
            shape = [*tensor.shape[:axis], other, *tensor.shape[axis + 1 :]]
            yield f"axis {axis} is {other}", torch.zeros(shape, dtype=tensor.dtype)
    yield "one axis more", tensor[None].clone()
    yield "one axis fewer", tensor[0].clone()
    if tensor.ndim > 1 and tensor.shape[-1] != tensor.shape[-2]:
        yield "transposed", tensor.mT.contiguous()
    allowed = (torch.float32,) if tensor.is_floating_point() else ()
    for dtype in DTYPES:
        if dtype not in allowed:
            yield str(dtype), tensor.to(dtype)


def accepted(
    folder: Path,
    tensors: dict[str, torch.Tensor] | None = None,
    config: dict[str, Any] | None = None,
) -> bool:
    """Returns whether a folder opens with these files, or its error is not one line."""
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    try:
        FamilyWeights(folder)
    except WeightsError as error:
        return "\n" in str(error)
    return True


@everyday("case", [*CASES, *OTHERS], [FUSED, FOUR_BITS])
def test_a_tensor_of_another_shape_or_dtype_is_refused(case, tmp_path):
    written(case, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert accepted(tmp_path, tensors)
    first = {re.sub(r"(layers|h|layer|experts)\.\d+\.", r"\1.N.", name): name for name in tensors}
    wrong = []
    for name in first.values():
        without = {other: each for other, each in tensors.items() if other != name}
        if accepted(tmp_path, without):
            wrong.append(f"{name} is missing")
        wrong += [
            f"{name}: {label}"
            for label, each in altered(tensors[name])
            if accepted(tmp_path, without | {name: each})
        ]
    assert not wrong
    assert not accepted(tmp_path, tensors | {"model.layers.0.other": torch.zeros(3)})


@pytest.mark.parametrize(
    ("case", "name", "other"),
    [
        ("llama 3", "lm_head.weight", "model.embed_tokens.weight"),
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ],
)
def test_a_copy_of_another_shape_dtype_or_value_is_refused(case, name, other, tmp_path):
    written(case, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert accepted(tmp_path, tensors | {name: tensors[other].clone()})
    others = [*altered(tensors[other]), ("other values", tensors[other] + 1)]
    assert [label for label, each in others if accepted(tmp_path, tensors | {name: each})] == []


SIZES = re.compile(
    r"vocab_size|.*(hidden|intermediate|patch)_size|num_(hidden_layers|.*heads|.*experts.*|channels)"
    r"|n_(layer|head|embd|positions|.*experts|group)|.*_(head_dim|lora_rank|sparse_step)|topk_group"
)


@everyday("case", [*CASES, *OTHERS], KEPT)
def test_a_size_that_is_none_is_refused(case, tmp_path):
    written(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("qk_head_dim", None)  # the library computes it
    sizes = [key for key, value in config.items() if SIZES.fullmatch(key) and value is not None]
    assert len(sizes) > 4
    wrong = [
        (key, value)
        for key in sizes
        for value in (-1, 0, 1.5, "4", True, [])
        if accepted(tmp_path, config=config | {key: value})
        if value != 0 or "shared" not in key  # 0 shared experts are none
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("case", "change", "key"),
    [
        ("olmoe", {"num_experts": 9}, "no tensor layers.0.mlp.experts.8.gate_proj.weight"),
        (FUSED, {"num_experts": 9}, "mlp.gate.weight"),
        ("llama", {"num_hidden_layers": 4}, "no tensor layers.3.input_layernorm.weight"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types: "),
        ("qwen3", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta: "),
        ("qwen2_moe", {"norm_topk_prob": "false"}, "norm_topk_prob"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads: 2"),
        ("mixtral", {"depth_gate": 0.5}, "depth_gate: 0.5"),
        ("deepseek_v3", {"first_k_dense_replace": 9}, "first_k_dense_replace: 9"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type: "),
        ("bert", {"is_decoder": True}, "is_decoder: True"),
        ("bert", {"hidden_act": ["gelu"]}, "hidden_act"),
        ("bert", {"layer_norm_eps": None}, "layer_norm_eps"),
        ("bert", {"hidden_size": 33}, "hidden_size: 33"),
        ("gpt2", {"n_embd": 2**31 - 8}, "asks for more"),
        ("gpt2", {"model_type": "clip", "vision_config": None}, "vision_config: None"),
    ],
)
def test_the_key_that_does_not_fit_is_named(case, change, key, tmp_path):
    written(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert key in line_of(WeightsError, FamilyWeights, tmp_path)
