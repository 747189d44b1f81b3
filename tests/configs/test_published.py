"""Configurations of published shapes are what reading their config.json gives."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polyad.model.decoder import DecoderConfig
from polyad.model.families.family import comparable
from polyad.model.families.registry import family_of_files
from polyad.train.config.run import load_config
from tests.configs.test_shipped import expected

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "decoder"
# What config.json says on the hub, of those keys that say what is computed: read in copies of these
# files in public repositories. Older keys (rope_theta, rope_scaling), as the files have them.
HUB: dict[str, dict[str, Any]] = {
    # allenai/OLMoE-1B-7B-0924
    "olmoe-1b-7b": {
        "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 1024,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None,
        "max_position_embeddings": 4096, "rope_theta": 10000.0, "rope_scaling": None,
        "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "pad_token_id": 1, "eos_token_id": 50279,
        "router_aux_loss_coef": 0.01, "initializer_range": 0.02,
    },
    # Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 48,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rope_scaling": None,
        "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0,
        "hidden_act": "silu", "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": False, "router_aux_loss_coef": 0.001, "bos_token_id": 151643,
        "eos_token_id": 151645, "initializer_range": 0.02,
    },
    # ibm-granite/granite-3.1-3b-a800m-base
    "granite-3.1-3b-a800m": {
        "model_type": "granitemoe", "vocab_size": 49155, "hidden_size": 1536,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
        "intermediate_size": 512, "num_local_experts": 40, "num_experts_per_tok": 8,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625, "logits_scaling": 6.0,
        "max_position_embeddings": 131072, "rope_theta": 10000000.0, "rope_scaling": None,
        "rms_norm_eps": 1e-6, "attention_bias": False, "hidden_act": "silu",
        "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
        "initializer_range": 0.02,
    },
    # deepseek-ai/DeepSeek-V2-Lite
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "seq_aux": True,
        "aux_loss_alpha": 0.001, "max_position_embeddings": 163840, "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
        "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 100000,
        "eos_token_id": 100001, "initializer_range": 0.02, "pretraining_tp": 1,
    },
    # mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x7b": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
        "sliding_window": None, "attention_dropout": 0.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "router_aux_loss_coef": 0.02, "bos_token_id": 1,
        "eos_token_id": 2, "initializer_range": 0.02,
    },
    # openai/gpt-oss-20b
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "experts_per_token": 4, "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128,
        "max_position_embeddings": 131072, "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
        "rms_norm_eps": 1e-5, "attention_bias": True, "attention_dropout": 0.0,
        "swiglu_limit": 7.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "router_aux_loss_coef": 0.9, "pad_token_id": 199999, "eos_token_id": 200002,
        "initializer_range": 0.02,
    },
}  # fmt: skip
# Billions of parameters, as their authors or the hub report them.
REPORTED = {
    "olmoe-1b-7b": 6.92, "qwen3-30b-a3b": 30.5, "granite-3.1-3b-a800m": 3.30,
    "deepseek-v2-lite": 15.7, "mixtral-8x7b": 46.7, "gpt-oss-20b": 20.9,
}  # fmt: skip


def read(tree: dict[str, Any]) -> DecoderConfig:
    return family_of_files(tree, "config.json").read_config(tree, lambda name: None, "x")


def written_by_transformers(name: str) -> Any:
    settings = {key: value for key, value in HUB[name].items() if key != "model_type"}
    return transformers.CONFIG_MAPPING[HUB[name]["model_type"]](**settings)


@pytest.mark.parametrize("name", HUB)
@pytest.mark.parametrize("newer", [False, True], ids=["hub", "transformers"])
def test_a_published_shape_is_what_its_config_says(name, newer):
    theirs = read(written_by_transformers(name).to_dict() if newer else HUB[name])
    ours = load_config(FOLDER / f"{name}.yaml").model
    assert isinstance(ours, DecoderConfig)
    # Which leaves out how many tokens a run reads at once: here no more than the model is made for.
    assert ours.sequence_length <= theirs.sequence_length
    assert comparable(ours) == comparable(theirs)


@pytest.mark.parametrize("name", HUB)
def test_a_published_shape_has_the_parameters_of_transformers(name):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(written_by_transformers(name))
    parameters = expected(f"decoder/{name}.yaml")[2]
    assert sum(each.numel() for each in model.parameters()) == parameters
    assert parameters / 1e9 == pytest.approx(REPORTED[name], abs=0.05)
