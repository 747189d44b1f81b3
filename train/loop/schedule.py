"""How long a run trains, and the learning rate of every step."""

import math
from typing import Annotated, Literal

from pydantic import Field

from polyad.model.config import Config
from polyad.parallel.zero import Precision

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
