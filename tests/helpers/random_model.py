"""Models with their initial weights, and with weights far from these."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from polyad.model.build import build_model, materialize, read_model_config


def built(config: Any, seed: int = 0, **options: Any) -> Any:
    """A model with its initial weights.

    Args:
        config: Its configuration, or what is read as one.
        seed: Of the weights.
        options: Device and precision.
    """
    model = build_model(read_model_config(config) if isinstance(config, dict) else config)
    materialize(model, seed=seed, **options)
    return model


def drawn(part: Callable[[], Any], seed: int = 0, **options: Any) -> Any:
    """A part of a model with its initial values; `options` as for `built`."""
    with torch.device("meta"):
        module = part()
    materialize(module, seed=seed, **options)
    return module


def draw_anew(model: nn.Module, std: float, seed: int = 1) -> nn.Module:
    """Draws every weight: zeros of a gate or a head would hide a mistake. Returns the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model


def random_model(
    feed_forward: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    noise: float = 0.3,
    **sizes: Any,
) -> nn.Module:
    """A model in evaluation mode, by default a GPT-2 of two blocks.

    Args:
        feed_forward: The section of its feed-forwards.
        dtype: Its precision.
        noise: Standard deviation of what is added to initial values.
        sizes: Other keys of the model.
    """
    section = {
        "kind": "gpt2", "num_layers": 2, "hidden_size": 16, "num_heads": 4, "sequence_length": 12,
        "vocab_size": 61, "feed_forward": feed_forward,
    }  # fmt: skip
    model = built(section | sizes, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("score.bias"):  # which would choose the same experts everywhere
                continue
            random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise * random)
    return model.to(dtype).eval()
