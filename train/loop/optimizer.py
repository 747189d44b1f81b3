"""How long a run trains, the learning rate of each step, and optimizers: which weights decay, and
groups of parameters with settings of their own.
"""

import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn

from polyad.model.config import Config
from polyad.model.kernels.switch import on_cpu
from polyad.model.patterns import matched, matches
from polyad.parallel.shard import placement_of
from polyad.parallel.zero import RATE_FACTOR, STATE_TENSORS, Precision
from polyad.train.errors import ConfigError
from polyad.train.loop.muon import OF_MATRICES, OF_OTHERS, Matrix, Muon, is_matrix, matrix_of

Count = Annotated[int, Field(ge=1, le=2**63 - 1)]


class TrainConfig(Config):
    """How much is trained on, and in which pieces."""

    steps: Count
    """Optimizer steps of the whole run."""
    global_batch_size: Count
    """Samples in an optimizer step, over all processes."""
    micro_batch_size: Count
    """Samples in one forward pass of one process; the rest is accumulated."""
    precision: Precision = "fp32"
    """Precision of weights and activations in both passes; master weights are always fp32."""
    tf32: bool = False
    """Whether a GPU may round the factors of fp32 matrix products to TF32 (10 bits of mantissa
    instead of 23), which is several times as fast. No by default: fp32 is for comparing with other
    layouts and machines, bf16 for speed. Nothing changes in bf16, or on a CPU."""
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay d of an exponential moving average of the weights, d average + (1 - d) weight after
    every step that is applied, as 0.9999; in fp32, from the first weights on. It is kept in
    checkpoints, for `polyad evaluate` and `convert`; training and its validation do not use it.
    null: none is kept."""
    max_skipped_steps: Count = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite."""


class ScheduleConfig(Config):
    """How the learning rate moves; its highest value is `optimizer.learning_rate`."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """After warm-up: down a half cosine, down a line, or on a level."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear rise from 0; the last of them reaches the highest value."""
    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """The step at which the cosine or the line ends; null: `train.steps`."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the cosine or the line and after it, as a share of the highest:
    0 for none (MLP-Mixer), 0.0033333 for 3e-3 to 1e-5 (V-MoE)."""


def learning_rate(config: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """The learning rate of one optimizer step.

    Args:
        config: the schedule.
        peak: the highest learning rate, which warm-up ends at.
        step: optimizer steps done before this one.
        total_steps: of the run.

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
"""Parameters that are added or looked up, and multiply nothing, by a part of their names."""
FIRST_LAYERS = (*NO_KERNELS, "patch_embedding", "embedding_norm", "pre_norm")
"""Parameters before the first block, by a part of their names."""
WARMUP = "warmup"
"""The key of an optimizer's group for its whole factor and the steps in which it gets there."""


class GroupConfig(Config):
    """Settings of some parameters; one that several groups match belongs to the first."""

    match: str
    """Their names, or ends of names, with * for anything, as `blocks.*.attention.*`."""
    learning_rate: NonNegative = 1.0
    """A factor of the learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which that factor rises from 0, on top of the schedule's own warm-up."""
    weight_decay: NonNegative | None = None
    """The weight decay of what decays of them, in place of optimizer.weight_decay; null: that."""
    freeze: bool = False
    """Whether they stay as they are: no gradients, no moments."""


class OptimizerConfig(Config):
    """How weights are updated."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """`adamw` to train; `sgd` to compare layouts, since Adam hides a wrong gradient scale; `muon`:
    orthogonalized updates of the blocks' matrices but routers and gates, with a momentum of 0.95,
    and AdamW for the rest, both with one learning rate. It needs ZeRO stage 0."""
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
    """The momentum of sgd."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest L2 norm of the whole gradient; 0 does not clip."""
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False)] = ()
    """Parameters with settings of their own."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Layer-wise decay d of the learning rate: of L blocks block i, from 0, has it times d^(L - i),
    embeddings times d^(L + 1), and what is behind the blocks times 1 (as BEiT); null: none."""


def build_optimizer(
    config: OptimizerConfig, parameters: list[tuple[str, nn.Parameter, int]]
) -> torch.optim.Optimizer:
    """Makes the optimizer.

    Args:
        config: kind and hyperparameters.
        parameters: (name, parameter, number of dimensions in the model); those that require no
            gradient are left out.

    Returns:
        An optimizer with a group for each weight decay, factor of the learning rate and warm-up of
        it, and with muon for each shape of matrices: what decays first. The key `RATE_FACTOR` of a
        group has its factor, which `warm_up` changes where the group has a warm-up.
    """
    blocks = num_blocks(name for name, _, _ in parameters)
    found: dict[tuple[float, float, int, Matrix | None], list[nn.Parameter]] = {}
    for name, parameter, dimensions in parameters:
        if not parameter.requires_grad:
            continue
        group = group_of(config, name)
        decay = config.weight_decay
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        decay = decay if _decays(config, name, dimensions) else 0.0
        factor = 1.0 if group is None else group.learning_rate
        steps = 0 if group is None else group.warmup_steps
        if config.layer_decay is not None:
            factor *= config.layer_decay ** depth_from_end(name, blocks)
        matrix = None
        if config.kind == "muon":
            real = placement_of(parameter).global_shape
            matrix = matrix_of(name, tuple(parameter.shape), real)
        found.setdefault((decay, factor, steps, matrix), []).append(parameter)
    ordered = sorted(found.items(), key=lambda each: each[0][:3], reverse=True)
    groups: list[dict[str, Any]] = [
        {
            "params": some,
            "weight_decay": decay,
            "lr": config.learning_rate * factor,
            RATE_FACTOR: factor,
            WARMUP: (factor, steps),
        }
        for (decay, factor, steps, _), some in ordered
    ]
    if config.kind == "muon":
        for settings, ((_, _, _, matrix), _) in zip(groups, ordered, strict=True):
            kept = OF_OTHERS if matrix is None else OF_MATRICES
            settings |= {"matrix": matrix, STATE_TENSORS: kept}
        return Muon(groups, config.betas, config.epsilon)
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    on_gpu = not on_cpu(parameters[0][1])
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=on_gpu
    )


def warm_up(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Sets the factors of groups that have a warm-up of their own; call it before each step.

    Args:
        optimizer: of `build_optimizer`.
        step: of the run, that is done next: 0 for the first.
    """
    for group in optimizer.param_groups:
        factor, steps = group[WARMUP]
        group[RATE_FACTOR] = factor * min(1.0, (step + 1) / max(1, steps))


def group_of(config: OptimizerConfig, name: str) -> GroupConfig | None:
    """The group of a parameter; None: it has no settings of its own."""
    return next((group for group in config.groups if matches(group.match, name)), None)


def check_groups(config: OptimizerConfig, names: Iterable[str]) -> None:
    """Checks that every group has parameters.

    Raises:
        ConfigError: a pattern matches nothing, or only what groups before it have.
    """
    left = list(names)
    everything = list(left)
    for number, group in enumerate(config.groups):
        key = f"optimizer.groups.{number}.match"
        some = matched(key, [group.match], everything)
        if not set(some) & set(left):
            raise ConfigError(
                f"{key}: {group.match!r} matches only parameters that a group before it has; the "
                f"first group that matches counts, so put the narrower one first"
            )
        left = [name for name in left if name not in some]


def freeze(model: nn.Module, config: OptimizerConfig) -> None:
    """Freezes the parameters of groups that say so, in place.

    Args:
        model: a whole one.
        config: with the groups.

    Raises:
        ConfigError: a group has no parameters, or nothing is left to train.
    """
    check_groups(config, [name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        group = group_of(config, name)
        if group is not None and group.freeze:
            parameter.requires_grad_(False)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(
            "optimizer.groups: freeze: true of all of them leaves nothing to train; at least one "
            "parameter is needed"
        )
    if config.kind == "muon" and not any(is_matrix(name) for name in trained):
        raise ConfigError(
            "optimizer.kind: muon is not allowed where no matrix of a block is trained; adamw and "
            "sgd are"
        )


def depth_from_end(name: str, blocks: int) -> int:
    """How many layers lie from a parameter's to the end; what is behind the blocks has none.

    Source: Bao et al. 2021, "BEiT", as in its released code."""
    if block := re.search(r"(?:^|\.)blocks\.(\d+)\.", name):
        return blocks - int(block[1])
    return blocks + 1 if any(part in name for part in FIRST_LAYERS) else 0


def num_blocks(names: Iterable[str]) -> int:
    """The number of blocks that parameters with these names are of."""
    found = [re.search(r"(?:^|\.)blocks\.(\d+)\.", name) for name in names]
    return max((int(each[1]) + 1 for each in found if each), default=0)


def _decays(config: OptimizerConfig, name: str, dimensions: int) -> bool:
    if config.decay == "all":
        return True
    is_kernel = not any(part in name for part in NO_KERNELS)
    return dimensions >= 2 and (is_kernel or config.decay == "matrices")


def state_tensors(config: OptimizerConfig, name: str | None = None) -> tuple[str, ...]:
    """Names of the tensors of a weight's shape that the optimizer keeps beside the master weight.

    They are those of `Engine.state_fields`, which takes an engine.

    Args:
        config: with the kind.
        name: of the weight; None: of that which has most.
    """
    if config.kind == "sgd":
        return ("momentum_buffer",) if config.momentum else ()
    if config.kind == "muon" and name is not None and is_matrix(name):
        return OF_MATRICES
    return OF_OTHERS
