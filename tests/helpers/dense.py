"""Folders of weights under our names, far from initial values, and the outputs of their models."""

from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from polyad.model.build import build_model, initial_values, read_model_config
from tests.helpers.bert import padded_input

TEXT = {
    "kind": "gpt2", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "sequence_length": 32,
    "vocab_size": 400,
}  # fmt: skip
IMAGES = {"num_layers": 2, "hidden_size": 32, "image_size": 16, "patch_size": 4, "num_classes": 7}


def write_weights(folder: Path, section: dict[str, Any], spread: float = 0.1) -> Path:
    """Writes config.yaml and model.safetensors, with noise of this deviation added to all
    weights."""
    config = read_model_config(section)
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: value + spread * torch.randn(value.shape, generator=generator)
        for name, value in initial_values(build_model(config), 3)
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": config.model_dump(mode="json")}))
    return folder


def with_nan(source: Path, folder: Path, name: str) -> Path:
    """Copies a folder of weights, with a NaN in one of them."""
    weights = load_file(source / "model.safetensors")
    weights[name].view(-1)[3] = torch.nan
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.yaml").write_text((source / "config.yaml").read_text())
    return folder


@torch.no_grad()
def output_of(model: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """Returns a model's output for random input of its kind."""
    generator, given = torch.Generator().manual_seed(1), padded_input()
    kind = model.config.kind
    if kind in ("gpt2", "decoder"):
        given = (torch.randint(model.config.vocab_size, (3, 32), generator=generator),)
    elif kind != "bert":
        given = (torch.randn(3, 3, 16, 16, generator=generator, dtype=dtype),)
    return model.to(dtype)(*given)


def logits_of(model: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
    """The logits of `output_of`, of a BERT those of tokens that are no padding."""
    logits: Tensor = output_of(model, dtype).logits
    return logits[padded_input()[1]] if model.config.kind == "bert" else logits
