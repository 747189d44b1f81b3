"""Opens a model's weights in any format: a checkpoint, Hugging Face, or plain safetensors."""

from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from model.build import build_model, initial_value, place
from parallel.checkpoint.checkpoint import Checkpoint, find_checkpoint
from parallel.fragments import persistent_buffers
from parallel.huggingface import HuggingFaceWeights, is_huggingface_folder
from parallel.plain_weights import PlainWeights, is_plain_folder
from parallel.zero import DTYPES, Precision

Weights: TypeAlias = Checkpoint | HuggingFaceWeights | PlainWeights
"""A model's weights in any format: names, shapes and whole tensors, one at a time."""


def open_weights(path: Path) -> Weights:
    """The weights that a path means: a checkpoint, a run's newest one, a Hugging Face folder of
    GPT-2, or a folder of safetensors under our names.

    Raises:
        ValueError: with an `exit_status` of 2: it is none of them, or cannot be used.
    """
    if is_huggingface_folder(path):
        return HuggingFaceWeights(path)
    if is_plain_folder(path):
        return PlainWeights(path)
    return open_checkpoint(path)


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, or a run's newest one, whose weights are those of its configuration.

    Raises:
        ValueError: with an `exit_status` of 2: there is none, or it cannot be used.
    """
    checkpoint = Checkpoint(find_checkpoint(path))
    checkpoint.check_own_model()
    return checkpoint


def load_model(
    path: Path | str,
    device: torch.device | str = "cpu",
    precision: Precision = "fp32",
) -> nn.Module:
    """A model with the weights that a path means, on one device, in evaluation mode.

    Args:
        path: as in `open_weights`.
        device: where it goes.
        precision: of its parameters.

    Returns:
        The model; no process group is needed.
    """
    stored = open_weights(Path(path))
    model = build_model(stored.model_config())
    weights = ((name, stored.whole(name)) for name, _ in model.named_parameters())
    buffers = [name for name, _ in persistent_buffers(model)]
    place(model, weights, device, DTYPES[precision])
    place(
        model, ((name, initial_value(model, name, 0)) for name, _ in model.named_buffers()), device
    )
    place(model, ((name, stored.buffer(name)) for name in buffers), device)
    return model.eval()
