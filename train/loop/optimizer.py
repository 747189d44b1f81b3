"""Optimizers, and which weights decay."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from model.config import Config
from model.kernels.switch import on_cpu

NonNegative = Annotated[float, Field(ge=0, le=1e6)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
NO_KERNELS = ("token_embedding", "position_embedding", "class_token")
"""Parameters that are added or looked up, and multiply nothing, by a part of their names."""


class OptimizerConfig(Config):
    """How weights are updated."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """`adamw` to train; `sgd` to compare layouts, since Adam hides a wrong gradient scale."""
    learning_rate: Annotated[float, Field(gt=0, le=1e6)] = 6e-4
    """The highest, after warm-up."""
    weight_decay: NonNegative = 0.1
    """What a step takes off a weight: this, times the learning rate, times the weight (V-MoE's
    "Adam" with decay is this AdamW, too). With sgd it is part of the gradient."""
    decay: Literal["matrices", "kernels", "all"] = "matrices"
    """What decays: `matrices`, embeddings among them, not biases and LayerNorms; `kernels`, without
    the embeddings of tokens and positions and the class token (V-MoE); `all` (MLP-Mixer)."""
    betas: Annotated[tuple[Momentum, Momentum], Field(strict=False)] = (0.9, 0.95)
    """Decay of AdamW's two moments a step."""
    epsilon: Annotated[float, Field(gt=0, le=1e6)] = 1e-8
    """Added to the root of AdamW's second moment."""
    momentum: Momentum = 0.0
    """Of sgd."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest L2 norm of the whole gradient; 0 does not clip."""


def build_optimizer(
    config: OptimizerConfig, parameters: list[tuple[str, nn.Parameter, int]]
) -> torch.optim.Optimizer:
    """Makes the optimizer.

    Args:
        config: kind and hyperparameters.
        parameters: (name, parameter, number of dimensions in the model).

    Returns:
        An optimizer with two groups: what decays, and the rest; one if there is no rest.
    """
    groups = [
        {
            "params": [p for name, p, n in parameters if _decays(config, name, n) is decays],
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    on_gpu = not on_cpu(parameters[0][1])
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=on_gpu
    )


def _decays(config: OptimizerConfig, name: str, dimensions: int) -> bool:
    if config.decay == "all":
        return True
    is_kernel = not any(part in name for part in NO_KERNELS)
    return dimensions >= 2 and (is_kernel or config.decay == "matrices")


def state_tensors(config: OptimizerConfig) -> tuple[str, ...]:
    """Names of the tensors of a weight's shape that the optimizer keeps beside the master weight.

    They are those of `Engine.state_fields`, which takes an engine.
    """
    if config.kind == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum else ()


def num_state_tensors(config: OptimizerConfig) -> int:
    """The number of tensors that `state_tensors` names."""
    return len(state_tensors(config))
