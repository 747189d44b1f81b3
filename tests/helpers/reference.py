"""Hugging Face's GPT-2, on the weights of ours or on random ones: an independent implementation."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config as ReferenceConfig
from transformers import GPT2LMHeadModel

REFERENCE_NAMES = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "final_norm": "ln_f",
    "blocks": "h",
    "attention_norm": "ln_1",
    "attention": "attn",
    "qkv": "c_attn",
    "projection": "c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward": "mlp",
    "up": "c_fc",
    "down": "c_proj",
}


def reference_of(model):
    """Transformers' GPT-2 on the same weights, and {our name: (its parameter, transposed?)}."""
    config = model.config
    reference = GPT2LMHeadModel(
        ReferenceConfig(
            vocab_size=config.vocab_size,
            n_positions=config.sequence_length,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.feed_forward.inner_size(config.hidden_size),
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    renamed = {}
    for name, parameter in model.named_parameters():
        parts = [REFERENCE_NAMES.get(part, part) for part in name.split(".")]
        if name == "head.weight":
            theirs = reference.lm_head.weight
        else:
            theirs = reference.transformer.get_parameter(".".join(parts))
        # transformers stores linear layers as Conv1D: [in, out].
        transposed = parts[-2].startswith("c_") and parts[-1] == "weight"
        with torch.no_grad():
            theirs.copy_(parameter.T if transposed else parameter)
        renamed[name] = (theirs, transposed)
    assert len(renamed) == len(list(reference.parameters()))
    return reference, renamed


SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 400}


def save_reference(folder: Path, *, shard_size: str = "5GB", **overrides: Any) -> GPT2LMHeadModel:
    """Writes a GPT-2 with random weights far from their initial values, and returns it."""
    torch.manual_seed(11)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(ReferenceConfig(**(SMALL | ids | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model.eval()
