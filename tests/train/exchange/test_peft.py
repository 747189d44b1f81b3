"""Adapters of decoders in peft's files: what peft computes with them, and what they are here."""

import json
from functools import cache

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from polyad.model.families.keys import WeightsError
from polyad.model.lora import LoRAConfig
from polyad.parallel.weights import load_model, open_weights
from polyad.train.exchange.convert import convert
from tests.helpers.adapted import adapted_checkpoint, assert_all_loaded
from tests.helpers.bert import their_bert
from tests.helpers.decoders import theirs, tokens
from tests.helpers.everyday import everyday
from tests.helpers.reference import save_reference

ALL = LoRAConfig(rank=3, alpha=6.0, targets=("attention.*", "feed_forward.*"), experts=True)
FAMILIES = ("olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
OTHERS = ("llama", "qwen2_moe", "granitemoe", "granitemoeshared", "deepseek_v2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By case: the base's folder, a checkpoint of adapters beside it, and the logits of both."""

    @cache
    def make(case):
        folder = tmp_path_factory.mktemp("adapted")
        theirs(case).save_pretrained(folder / "base")
        lora = ALL.model_copy(update={"experts": case != "llama"})  # which is dense
        model = adapted_checkpoint(folder / "step-00000000", folder / "base", lora)
        with torch.no_grad():
            return folder, model(tokens()).logits

    return make


def in_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def near(ours, wanted):
    """Whether logits are equal to rounding."""
    return (ours - wanted).abs().max() < 2e-5 * wanted.abs().max()


@everyday("case", [*FAMILIES, *OTHERS], FAMILIES)
def test_peft_and_merged_weights_compute_what_adapters_do(made, tmp_path, case):
    folder, wanted = made(case)
    convert(folder / "step-00000000", tmp_path / "peft", "peft")
    base = in_transformers(folder / "base")
    with torch.no_grad():
        before = base(tokens()).logits
        model = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
        logits = model(tokens()).logits
    assert_all_loaded(model, tmp_path / "peft")
    assert near(logits, wanted)
    assert not near(before, wanted)
    convert(folder / "step-00000000", tmp_path / "merged", "huggingface", merge=True)
    one, two = open_weights(tmp_path / "peft"), open_weights(folder / "step-00000000")
    for name in two.shapes():
        assert torch.allclose(one.whole(name), two.whole(name), atol=1e-6), name
    for each in (in_transformers(tmp_path / "merged"), load_model(one), load_model(two)):
        with torch.no_grad():
            assert near(each(tokens()).logits, wanted)
    told, was = (
        json.loads((each / "config.json").read_text())
        for each in (tmp_path / "merged", folder / "base")
    )
    assert told == was


TRAINED = {
    "mixtral": {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.down_proj", "mlp.gate.weight"],
        "use_rslora": True,
    },
    "gpt_oss": {
        "target_modules": "all-linear",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {"down_proj": 5, "layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"o_proj": 3},
    },
    "deepseek_v3": {
        "target_modules": ["kv_b_proj", "q_a_proj"], "target_parameters": ["experts.gate_up_proj"],
    },
    "llama": {"target_modules": "all-linear"},
}  # fmt: skip


@everyday("case", TRAINED, ["gpt_oss", "mixtral"])
def test_adapters_that_peft_has_made_are_opened(made, tmp_path, case):
    folder, _ = made(case)
    settings = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 5} | TRAINED[case]
    model = get_peft_model(in_transformers(folder / "base"), LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2, generator=generator)
        wanted = model(tokens()).logits
        model.save_pretrained(tmp_path / "theirs")
        assert near(load_model(tmp_path / "theirs")(tokens()).logits, wanted)
        convert(tmp_path / "theirs", tmp_path / "merged", "huggingface", merge=True)
        assert near(in_transformers(tmp_path / "merged")(tokens()).logits, wanted)


def test_experts_one_by_one_are_those_of_all_in_one(made, tmp_path):
    folder, wanted = made("olmoe")
    convert(folder / "step-00000000", tmp_path / "peft", "peft")
    path = tmp_path / "peft" / "adapter_model.safetensors"
    stored, apart = load_file(path), {}
    for name, value in stored.items():
        owner, _, end = name.partition("experts.")
        if not end:
            apart[name] = value
            continue
        # By hand: 8 experts, rank 3 of each layer, gate before up; an expert's inner width is 48.
        down = not end.startswith("base_layer")
        rank = 3 if down else 6
        for expert in range(8):
            if "lora_A" in end:
                of_one = value[expert * rank : (expert + 1) * rank]
            else:
                of_one = value.view(-1, rank, 8)[:, :, expert]
            end = end.removeprefix("base_layer.")
            if down:
                apart[f"{owner}experts.{expert}.down_proj.{end}"] = of_one.contiguous()
                continue
            for number, layer in enumerate(("gate_proj", "up_proj")):
                mine = slice(3 * number, 3 * number + 3)
                rows = slice(48 * number, 48 * number + 48)
                part = of_one[mine] if "lora_A" in end else of_one[rows, mine]
                apart[f"{owner}experts.{expert}.{layer}.{end}"] = part.contiguous()
    save_file(apart, path)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    for key in ("target_parameters", "rank_pattern", "alpha_pattern"):
        del config[key]
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert near(load_model(tmp_path / "peft")(tokens()).logits, wanted)


SETTINGS = {
    "use_dora: True is not supported": {"use_dora": True},
    "modules_to_save: ['lm_head'] is not supported": {"modules_to_save": ["lm_head"]},
    "adapter_config.json: init_lora_weights": {"init_lora_weights": "pissa"},
    "peft_type: 'IA3': ": {"peft_type": "IA3"},
    "r: is missing": {"r": None},
    "rank 4 beside model.layers.0.self_attn.q_proj.weight": {"r": 4},
    "base_model_name_or_path: gone": {"base_model_name_or_path": "gone"},
    "rank_pattern or alpha_pattern: missing ), unterminated": {"rank_pattern": {"(": 3}},
}
FIRST = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
TENSORS = {
    f"{FIRST} is I8, allowed: F32, F16, BF16": lambda t: t | {FIRST: t[FIRST].to(torch.int8)},
    f"{FIRST} is [": lambda t: t | {FIRST: t[FIRST].T.contiguous()},
    "base_model.model.other.lora_A.weight belongs to no weight of": lambda t: (
        t | {"base_model.model.other.lora_A.weight": torch.ones(3, 32)}
    ),
    "adds nothing: all lora_B are zero": lambda t: {n: v * ("lora_A" in n) for n, v in t.items()},
}


def test_what_is_no_adapter_of_the_base_is_refused_in_one_line(made, tmp_path, refused):
    folder, _ = made("olmoe")
    place = tmp_path / "peft"
    convert(folder / "step-00000000", place, "peft")
    config, path = place / "adapter_config.json", place / "adapter_model.safetensors"
    before, stored = json.loads(config.read_text()), load_file(path)
    words = ("convert", place, tmp_path / "new", "--to", "huggingface")
    for part, change in SETTINGS.items():
        changed = {key: value for key, value in (before | change).items() if value is not None}
        config.write_text(json.dumps(changed))
        assert part in refused(*words, "--merge")
    config.write_text(json.dumps(before))
    for part, change in TENSORS.items():
        save_file(change(stored), path)
        assert part in refused(*words, "--merge")
    save_file(stored, path)
    assert "--merge" in refused(*words)
    assert "--to" in refused(*words[:3], "--to", "peft")
    assert "is not a Hugging Face folder" in refused(*words, "--merge", "--base", place)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("lora", "buffers", "message"),
    [
        (ALL.model_copy(update={"trained": ("final_norm.*",)}), {}, "final_norm.weight was"),
        (ALL, {"balancing_bias": 0.1}, "blocks.1.feed_forward.router.selection.balancing_bias"),
    ],
)  # fmt: skip
def test_what_peft_cannot_hold_is_refused_by_name(made, tmp_path, lora, buffers, message):
    folder, _ = made("deepseek_v3")
    adapted_checkpoint(tmp_path / "step-00000000", folder / "base", lora, **buffers)
    with pytest.raises(ValueError, match=r"--to peft") as caught:
        convert(tmp_path / "step-00000000", tmp_path / "peft", "peft")
    assert message in str(caught.value)
    assert not (tmp_path / "peft").exists()
    convert(tmp_path / "step-00000000", tmp_path / "merged", "huggingface", merge=True)
    with torch.no_grad():
        logits = load_model(tmp_path / "step-00000000")(tokens()).logits
        assert near(in_transformers(tmp_path / "merged")(tokens()).logits, logits)


@pytest.mark.parametrize(
    ("case", "tied", "target"),
    [
        ("llama", True, "embed_tokens"), ("llama", False, "lm_head"), ("gpt2", True, "wpe"),
        ("gpt2", True, "lm_head"), ("bert", True, "word_embeddings"), ("bert", True, "decoder"),
    ],
)  # fmt: skip
def test_adapters_on_an_embedding_or_a_head_are_refused_as_such(tmp_path, case, tied, target):
    if case == "llama":
        model = theirs(case, tie_word_embeddings=tied)
    else:
        model = save_reference(tmp_path) if case == "gpt2" else their_bert("BertForMaskedLM")
    model.save_pretrained(tmp_path / "base")
    settings = LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    adapted = get_peft_model(model, settings)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "peft")
    with pytest.raises(WeightsError, match="adapters on embeddings and heads are not supported"):
        open_weights(tmp_path / "peft")
