"""A few steps of a small model on random input: losses, norms, every gradient and every weight.

The same trial on one process and on a layout must give the same numbers. Losses and gradients are
those of SGD, since Adam would hide a wrong gradient scale, and amplify what is zero up to rounding.
Gradients are read from its momentum after the first step, as saved by the layout. Weights are
compared after steps of SGD without weight decay and of the configuration's own optimizer, so that a
weight which an optimizer does not update is found. The effect of rounding is measured on one
process, with weights that differ by one rounding.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from polyad.model.config_yaml import dump
from polyad.model.lora import of_base
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import Box
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.checkpoint.save import save
from polyad.parallel.source import InitialWeights, on_base
from polyad.parallel.zero import Engine
from polyad.train.config.adaptation import model_of
from polyad.train.config.parts import engine_of
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig
from polyad.train.loop.device import Prefetch
from polyad.train.loop.optimizer import OptimizerConfig
from polyad.train.loop.step import train_step
from polyad.train.tasks.random_input import losses_for, random_batch

GRADIENTS = OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=0.0, clip_grad_norm=0.0)
"""With zero initial momentum, momentum equals the gradient."""
GRADIENT = "momentum_buffer"
LEARNING_RATE = 1e-2
STEPS = 3


class Trial(BaseModel):
    """Results of a layout; its tensors are in two checkpoints."""

    losses: list[float]
    grad_norms: list[float]
    gradients: Path
    """A checkpoint of the initial weights, whose momentum is their gradient."""
    descended: Path
    """A checkpoint after the steps with SGD."""
    trained: Path
    """A checkpoint after as many steps of the configuration's own optimizer."""


class Nudged(InitialWeights):
    """Initial weights, each changed by at most one rounding of fp32."""

    def weight(self, box: Box) -> torch.Tensor:
        """A box of a parameter's value; only on one process, where a box is the whole parameter."""
        value = super().weight(box)
        generator = torch.Generator().manual_seed(zlib.crc32(box.name.encode()))
        up_or_down = torch.randint(-1, 2, value.shape, generator=generator)
        return value * (1 + torch.finfo(torch.float32).eps * up_or_down)


def run_trial(config: RunConfig, world: comm.World, folder: Path, *, nudged: bool = False) -> Trial:
    """Trains on this layout; all processes call it together.

    Args:
        config: a small configuration.
        world: this process.
        folder: folder for the checkpoints, shared by all processes.
        nudged: whether to start from `Nudged` weights, to measure the effect of rounding.
    """
    dims = validate(config, world.size)
    start = (Nudged if nudged else InitialWeights)(model_of(config), config.seed)
    engine = engine_of(config, dims, world, start, optimizer=GRADIENTS)
    _step(engine, config, 0, learning_rate=0.0)
    gradients = _save(engine, config, folder / "gradients", 1)
    outcomes = [_step(engine, config, step, LEARNING_RATE) for step in range(STEPS)]
    descended = _save(engine, config, folder / "descended", STEPS)
    engine = engine_of(config, dims, world, start)
    for step in range(STEPS):
        _step(engine, config, step, LEARNING_RATE)
    trained = _save(engine, config, folder / "trained", STEPS)
    return Trial(
        losses=[loss for loss, _ in outcomes],
        grad_norms=[norm for _, norm in outcomes],
        gradients=gradients,
        descended=descended,
        trained=trained,
    )


def save_again(config: RunConfig, world: comm.World, checkpoint: Path, folder: Path) -> Path:
    """Loads a checkpoint into this layout and saves it untouched.

    Returns:
        The new checkpoint.
    """
    saved = Checkpoint(checkpoint)
    model = model_of(config)
    start = InitialWeights(model, config.seed)
    source = on_base(start, saved, of_base(model), buffers=saved)
    engine = engine_of(config, validate(config, world.size), world, source)
    return _save(engine, config, folder / "again", STEPS)


def _step(
    engine: Engine, config: RunConfig, step: int, learning_rate: float
) -> tuple[float, float]:
    batches = list(micro_batches(config, engine.world, step))
    outcome = train_step(
        engine,
        losses_for(config.model),
        Prefetch(iter(batches), engine.world.device),
        len(batches),
        learning_rate,
        losses=config.loss,
        progress=(step + 1) / (STEPS + 1),
        record_is_due=step != 1,  # most steps of a run have no record
    )
    return outcome.loss, outcome.result.grad_norm


def micro_batches(config: RunConfig, world: comm.World, step: int) -> Iterator[Any]:
    """Yields this process's micro-batches of a step; together they are the same on any layout.

    Args:
        config: a small configuration.
        world: this process.
        step: the step's number, which is the seed.
    """
    size = config.train.micro_batch_size
    for number in range(config.train.global_batch_size // size):
        if number % world.data_parallel_size == world.data_parallel_rank:
            samples = range(number * size, (number + 1) * size)
            numbers = [1_000_000 * step + each for each in samples]
            yield random_batch(config.model, numbers, config.data)


def _save(engine: Engine, config: RunConfig, folder: Path, step: int) -> Path:
    model = dump({"model": config.model.model_dump(mode="json")})
    folder.parent.mkdir(parents=True, exist_ok=True)
    return save(engine, folder, step, state={}, config_yaml=model)
