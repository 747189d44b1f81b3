"""Adapters of a dense GPT-2 as the library peft reads them, over transformers' GPT-2.

adapter_config.json           rank, alpha, and the layers by transformers' names
adapter_model.safetensors     A and B of each; peft's have our orientation
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from model.gpt2 import GPT2Config
from model.huggingface import PREFIX, config_to_huggingface, their_tensor
from model.lora import LowRank
from parallel.adapted import AdaptedCheckpoint
from train.errors import ConfigError

ADAPTER_CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"


def peft_files(weights: AdaptedCheckpoint) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """What both files hold.

    Args:
        weights: of a run with LoRA.

    Returns:
        The content of adapter_config.json, and names and values of the other file.

    Raises:
        ValueError: with an `exit_status` of 2: the model is not a dense GPT-2, or has weights that
            were trained whole.
    """
    config = weights.model_config()
    if not isinstance(config, GPT2Config):
        raise ConfigError(
            f"--to peft: {weights.folder}: model.kind: {config.kind} is not allowed; gpt2 is"
        )
    config_to_huggingface(config, None)  # raises an error if transformers has no such model
    whole = weights.shapes().keys() - weights.frozen
    if whole:
        raise ConfigError(
            f"--to peft: {weights.folder}: {min(whole)} was trained whole (adapt.lora.trained), "
            f"which is in no adapter; --merge writes whole weights"
        )
    layers = {name: PREFIX + their_tensor(name).name.removesuffix(".weight")
              for name in weights.adapters}  # fmt: skip
    tree = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(weights.base.folder),
        "r": weights.lora.rank,
        "lora_alpha": weights.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(layers.values()),
        "fan_in_fan_out": True,  # transformers' GPT-2 stores weights transposed
        "bias": "none",
        "inference_mode": True,
    }
    return tree, _tensors(weights, layers)


def _tensors(weights: AdaptedCheckpoint, layers: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    for name, theirs in layers.items():
        path, adapter = weights.adapters[name]
        assert isinstance(adapter, LowRank)
        for matrix in ("A", "B"):
            stored = f"base_model.model.{theirs}.lora_{matrix}.weight"
            yield stored, weights.own(f"{path}.{matrix}")
