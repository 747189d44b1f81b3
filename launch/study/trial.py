"""A few real steps of a variant in a process of its own: how long a run of it will take.

    python -m polyad.launch.study.trial OUT BEGAN SPLIT BASE key=value ...

writes JSON into OUT: the seconds of a start, since the process was asked for at BEGAN, of an
optimizer step and of a forward pass, and how many of these a run takes. Input is random, of the
shape of the run's: reading data is not in it.
"""

import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from polyad.data.files import write_whole
from polyad.launch.ending import guard
from polyad.launch.machine import end_with_launcher, prepare_environment
from polyad.launch.signals import unblock_signals
from polyad.model.bert import BertConfig
from polyad.model.gpt2 import GPT2Config
from polyad.model.vision import ImageSettings
from polyad.parallel import comm
from polyad.parallel.source import InitialWeights
from polyad.parallel.zero import Engine
from polyad.train.config.adaptation import model_of
from polyad.train.config.distillation import teacher_here
from polyad.train.config.plan import open_plan
from polyad.train.config.run import RunConfig
from polyad.train.errors import STOP_SIGNALS, ConfigError, RunError
from polyad.train.layout.trial import engine_of, micro_batches
from polyad.train.loop.device import Prefetch, allow_tf32
from polyad.train.loop.step import train_step
from polyad.train.tasks.random_input import RandomBatch, losses_for, random_batch
from polyad.train.tasks.task import Task

TIMED = 3
"""Steps and forward passes that are timed, after one that is not."""


def timed_trial(config: RunConfig, task: Task[Any], split: str, began: float) -> dict[str, Any]:
    """Takes the times of a run.

    Args:
        config: with all that the data decides filled in.
        task: of the run.
        split: that it is scored on at its end.
        began: when the process was asked for, in seconds of the clock.

    Returns:
        JSON values.
    """
    world = comm.initialize(config.parallel.timeout_minutes)
    allow_tf32(config.train.tf32, world.device)
    start = InitialWeights(model_of(config), config.seed)
    engine = engine_of(config, world, config.optimizer, start, compiled=config.model.compile)
    engine.train()
    batches = [*micro_batches(config, world, 0)]
    losses_of = losses_for(config.model, teacher_here(config, world.device))
    _step(engine, config, losses_of, batches)
    stepped = time.time()
    step_seconds = _median(lambda: _step(engine, config, losses_of, batches))
    engine.train(False)
    samples = config.evaluation.batch_size or config.train.micro_batch_size
    batch = random_batch(config.model, range(samples), config.data)
    _pass(engine, config, batch)
    pass_seconds = _median(lambda: _pass(engine, config, batch))
    return {
        "start_seconds": max(0.0, stepped - began - step_seconds),
        "step_seconds": step_seconds,
        "pass_seconds": pass_seconds,
        "validation_passes": _validation_passes(config, task, samples),
        "scoring_passes": _passes(config, task, split, samples),
        "device": world.device.type,
    }


def _median(timed: Callable[[], None]) -> float:
    """Seconds of something that is done a few times."""
    times = []
    for _ in range(TIMED):
        begin = time.perf_counter()
        timed()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _step(
    engine: Engine, config: RunConfig, losses_of: Any, batches: Sequence[RandomBatch]
) -> None:
    """One optimizer step; its loss is waited for."""
    train_step(
        engine,
        losses_of,
        Prefetch(iter(batches), engine.device),
        len(batches),
        1e-6,
        losses=config.loss,
    )


def _pass(engine: Engine, config: RunConfig, batch: RandomBatch) -> None:
    """One forward pass as in an evaluation; its losses are waited for."""
    with torch.no_grad():
        losses, _ = losses_for(config.model)(engine, next(Prefetch(iter([batch]), engine.device)))
        losses.sum().item()


def _validation_passes(config: RunConfig, task: Task[Any], samples: int) -> int:
    """Forward passes of a validation while training."""
    if not task.has_validation:
        return 0
    passes, most = _passes(config, task, "validation", samples), config.evaluation.max_windows
    return passes if most is None else min(passes, math.ceil(most / samples))


def _passes(config: RunConfig, task: Task[Any], split: str, samples: int) -> int:
    """Forward passes over a whole split."""
    wanted = task.units_of(split) / task.model.units_per_sample()
    if task.model.units_per_sample() > 1 and config.evaluation.stride is not None:
        wanted *= task.model.units_per_sample() / config.evaluation.stride  # windows overlap
    return math.ceil(wanted / samples)


def _measure(out: str, began: str, split: str, base: str, *overrides: str) -> int:
    opened = open_plan(Path(base), overrides, 1)
    model = opened.config.model
    if not isinstance(model, GPT2Config | BertConfig | ImageSettings):
        raise ConfigError(f"model.kind: {model.kind}: no random input is known for it")
    try:
        found = timed_trial(opened.config, opened.task, split, float(began))
    except (RuntimeError, MemoryError) as error:  # as a GPU's memory that ran out
        raise RunError(f"{type(error).__name__}: {error}") from error
    write_whole(Path(out), json.dumps(found))
    return 0


def main() -> None:
    """Takes the times of the variant that the command line names."""
    for number in STOP_SIGNALS:  # there is nothing to save, and the study says what happened
        signal.signal(number, signal.SIG_DFL)
    end_with_launcher()
    unblock_signals()
    prepare_environment()
    comm.leave(guard(lambda: _measure(*sys.argv[1:])))


if __name__ == "__main__":
    main()
