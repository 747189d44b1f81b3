"""Hugging Face folders with random weights, made by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 400}


def save_reference(folder: Path, *, shard_size: str = "5GB", **overrides: Any) -> GPT2LMHeadModel:
    """Writes a GPT-2 with random weights far from their initial values, and returns it."""
    torch.manual_seed(11)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**(SMALL | ids | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model.eval()
