"""Training length, learning rate schedule, and optimizers: which weights decay, and parameter
groups with their own settings.
"""

import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn

from polyad.model.config import Config, matched, matches
from polyad.model.kernels.switch import on_cpu
from polyad.parallel.shard import placement_of
from polyad.parallel.zero import RATE_FACTOR, STATE_TENSORS, Precision
from polyad.train.errors import ConfigError
from polyad.train.loop.muon import OF_MATRICES, OF_OTHERS, Matrix, Muon, matrices, matrix_of

Count = Annotated[int, Field(ge=1, le=2**63 - 1)]


class TrainConfig(Config):
    """Training length, batch sizes and precision."""

    steps: Count
    """Number of optimizer steps of the whole run."""
    global_batch_size: Count
    """Number of samples per optimizer step, over all processes."""
    micro_batch_size: Count
    """Number of samples per forward pass of one process; gradients are accumulated until the global
    batch is complete."""
    precision: Precision = "fp32"
    """Precision of weights and activations in the forward and backward pass; master weights are
    always fp32."""
    tf32: bool = False
    """Whether a GPU may round the factors of fp32 matrix products to TF32 (10 bits of mantissa
    instead of 23), which is several times as fast. Off by default, because fp32 is meant for
    comparisons between layouts and machines, and bf16 for speed. No effect with bf16 or on a
    CPU."""
    cuda_graph: bool = False
    """Whether a GPU replays the passes through the blocks as CUDA graphs, which launch all kernels
    together. Meant for small models with few micro-batches per step, which are limited by kernel
    launches. No effect on a CPU."""
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay d of an exponential moving average of the weights, for example 0.9999: after every
    applied step the average becomes d average + (1 - d) weight, in fp32, starting from the initial
    weights. It is stored in checkpoints for `polyad evaluate` and `convert`; training and its
    validation do not use it. null: no average."""
    max_skipped_steps: Count = 10
    """Number of steps in a row, skipped because the loss or gradient is not finite, after which the
    run ends."""


class ScheduleConfig(Config):
    """Learning rate schedule; its peak is `optimizer.learning_rate`."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after warm-up: a half cosine, linear, or constant."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps of linear warm-up from 0; the last of them reaches the peak."""
    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """Step at which the decay ends; null: `train.steps`."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the decay and after it, as a fraction of the peak: for example 0
    (MLP-Mixer), or 0.0033333 to go from 3e-3 to 1e-5 (V-MoE)."""


def learning_rate(config: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """Computes the learning rate of one optimizer step.

    Args:
        config: the schedule.
        peak: the highest learning rate, reached at the end of warm-up.
        step: optimizer steps done before this one.
        total_steps: steps of the whole run.

    Returns:
        The rate. Warm-up never gives 0: its first step would be wasted.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return peak
    end = config.decay_steps or total_steps
    decayed = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    left = 1 - decayed if config.kind == "linear" else 0.5 * (1 + math.cos(math.pi * decayed))
    floor = peak * config.final_ratio
    return floor + (peak - floor) * left


NonNegative = Annotated[float, Field(ge=0, le=1e6)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
NO_KERNELS = ("token_embedding", "position_embedding", "segment_embedding", "class_token")
"""Name parts of parameters that are added or looked up, not multiplied by."""
FIRST_LAYERS = (*NO_KERNELS, "patch_embedding", "embedding_norm", "pre_norm")
"""Name parts of parameters before the first block."""
WARMUP = "warmup"
"""Key of an optimizer group: its final factor of the learning rate, and its warm-up steps."""


class GroupConfig(Config):
    """Optimizer settings for some parameters. A parameter belongs to the first group that matches
    it."""

    match: str
    """Patterns for names of parameters, or for ends of names, with * for anything, for example
    `blocks.*.attention.*`."""
    learning_rate: NonNegative = 1.0
    """Factor of the learning rate for these parameters."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps over which that factor rises from 0, in addition to the schedule's own
    warm-up."""
    weight_decay: NonNegative | None = None
    """Weight decay for those of these parameters that decay; null: optimizer.weight_decay."""
    freeze: bool = False
    """Whether these parameters are frozen: they get no gradients and no optimizer state."""


class OptimizerConfig(Config):
    """The optimizer."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """`adamw`, the usual choice; `sgd`, to compare layouts, because Adam hides a wrong gradient
    scale; `muon`, orthogonalized updates with a momentum of 0.95 for the matrices of the blocks
    (except routers and gates) and AdamW for the rest, with the same learning rate; needs ZeRO stage
    0 to 2."""
    learning_rate: Annotated[float, Field(gt=0, le=1e6)] = 6e-4
    """Peak learning rate, reached after warm-up."""
    weight_decay: NonNegative = 0.1
    """Weight decay: each step subtracts weight_decay x learning rate x weight from a weight
    (decoupled, also what V-MoE's "Adam" with decay does). With sgd it is added to the gradient."""
    decay: Literal["matrices", "kernels", "all"] = "matrices"
    """Which parameters decay: `matrices`, including embeddings but not biases and LayerNorms;
    `kernels`, the same without token and position embeddings and the class token (V-MoE); or `all`
    (MLP-Mixer)."""
    betas: Annotated[tuple[Momentum, Momentum], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of AdamW's two moment estimates, per step."""
    epsilon: Annotated[float, Field(gt=0, le=1e6)] = 1e-8
    """Epsilon that is added to the square root of AdamW's second moment."""
    momentum: Momentum = 0.0
    """Momentum of sgd."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Maximum L2 norm of the whole gradient, which is scaled down to it; 0: no clipping."""
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False)] = ()
    """Groups of parameters with their own settings."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Layer-wise decay d of the learning rate, as in BEiT: with L blocks, it is multiplied by d^(L
    - i) in block i (from 0), by d^(L + 1) in the embeddings and by 1 after the blocks; null: no
    decay."""


def build_optimizer(
    config: OptimizerConfig, parameters: list[tuple[str, nn.Parameter, int]]
) -> torch.optim.Optimizer:
    """Makes the optimizer.

    Args:
        config: kind and hyperparameters.
        parameters: (name, parameter, number of dimensions in the model); those that do not require
            a gradient are left out.

    Returns:
        An optimizer with a group for each combination of weight decay, learning rate factor and
        warm-up, and with muon also shape of matrices; groups that decay come first. The key
        `RATE_FACTOR` of a group has its factor, which `warm_up` updates if the group has a warm-up.
    """
    blocks = num_blocks(name for name, _, _ in parameters)
    of_muon = matrices(name for name, _, _ in parameters) if config.kind == "muon" else ()
    by_kind: dict[tuple[float, float, int, Matrix | None], list[nn.Parameter]] = {}
    for name, parameter, dimensions in parameters:
        if not parameter.requires_grad:
            continue
        shape = placement_of(parameter).global_shape
        group = group_of(config, name)
        factor, steps = group.learning_rate, group.warmup_steps
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        if not _decays(config, name, dimensions):
            decay = 0.0
        if config.layer_decay is not None:
            factor *= config.layer_decay ** depth_from_end(name, blocks)
        matrix = None
        if name in of_muon:
            matrix = matrix_of(name, tuple(parameter.shape), shape)
        by_kind.setdefault((decay, factor, steps, matrix), []).append(parameter)
    ordered = sorted(by_kind.items(), key=lambda each: each[0][:3], reverse=True)
    kept: tuple[str, ...] = OF_OTHERS
    if config.kind == "sgd":
        kept = ("momentum_buffer",) if config.momentum else ()
    groups: list[dict[str, Any]] = [
        {
            "params": some,
            "weight_decay": decay,
            "lr": config.learning_rate * factor,
            RATE_FACTOR: factor,
            WARMUP: (factor, steps),
            STATE_TENSORS: kept if matrix is None else OF_MATRICES,
            "matrix": matrix,
        }
        for (decay, factor, steps, matrix), some in ordered
    ]
    if config.kind == "muon":
        return Muon(groups, {"betas": config.betas, "eps": config.epsilon})
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    on_gpu = not on_cpu(parameters[0][1])
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=on_gpu
    )


def stacks_gates(config: OptimizerConfig) -> bool:
    """Returns whether the optimizer treats the gate of an expert like its other first layer, which
    can then be one parameter: Muon takes each as a matrix, and a group may name one of them.

    Args:
        config: kind and groups.
    """
    return config.kind != "muon" and not config.groups


def warm_up(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Sets the factors of groups that have their own warm-up; call it before each step.

    Args:
        optimizer: from `build_optimizer`.
        step: number of the run's next step, from 0.
    """
    for group in optimizer.param_groups:
        factor, steps = group[WARMUP]
        group[RATE_FACTOR] = factor * min(1.0, (step + 1) / max(1, steps))


def group_of(config: OptimizerConfig, name: str) -> GroupConfig:
    """Returns the group of a parameter, a neutral one if it has no settings of its own.

    Args:
        config: has the groups.
        name: the parameter's name.
    """
    matching = (group for group in config.groups if matches(group.match, name))
    return next(matching, GroupConfig(match=""))


def freeze(model: nn.Module, config: OptimizerConfig) -> None:
    """Freezes the parameters of groups with `freeze`, in place.

    Args:
        model: an unsharded model.
        config: has the groups.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for number, group in enumerate(config.groups):
        matched(f"optimizer.groups.{number}.match", [group.match], parameters)
    for name, parameter in parameters.items():
        if group_of(config, name).freeze:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError("optimizer.groups: freeze: true leaves no parameter to train")


def depth_from_end(name: str, blocks: int) -> int:
    """The number of layers from a parameter's to the end; 0 after the blocks.

    Source: Bao et al. 2021, "BEiT", as in its released code."""
    if block := re.search(r"(?:^|\.)blocks\.(\d+)\.", name):
        return blocks - int(block[1])
    return blocks + 1 if any(part in name for part in FIRST_LAYERS) else 0


def num_blocks(names: Iterable[str]) -> int:
    """The number of blocks of a model with these parameter names."""
    numbers = [re.search(r"(?:^|\.)blocks\.(\d+)\.", name) for name in names]
    return max((int(each[1]) + 1 for each in numbers if each), default=0)


def _decays(config: OptimizerConfig, name: str, dimensions: int) -> bool:
    if config.decay == "all":
        return True
    is_kernel = not any(part in name for part in NO_KERNELS)
    return dimensions >= 2 and (is_kernel or config.decay == "matrices")
