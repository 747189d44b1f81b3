"""Steps with records of where each process waits; called in worker processes."""

import time
from collections.abc import Callable

from polyad.parallel import comm
from polyad.train.config.run import RunConfig
from tests.benchmarks.scaling_process import Measured, Training

DOZING = 1
"""The rank of the process that sleeps."""


def measured_steps(config: RunConfig) -> Measured:
    """What `scaling.py` is told after a step that does not count."""
    training = _training(config)
    training.measured(1)
    return training.measured(2)


def around_a_sleep(config: RunConfig, seconds: float) -> list[Measured]:
    """Two measurements, without and with one process that sleeps in each forward pass."""
    training = _training(config)
    training.measured(1)
    awake = training.measured(1)
    if comm.rank() == DOZING:
        training.engine.module.register_forward_pre_hook(_sleeping(seconds))
    return [awake, training.measured(1)]


def _sleeping(seconds: float) -> Callable[..., None]:
    return lambda *_: time.sleep(seconds)


def _training(config: RunConfig) -> Training:
    degrees = config.parallel
    world = comm.initialize(
        tensor_parallel_size=degrees.tensor_parallel_size,
        expert_parallel_size=degrees.expert_parallel_size,
    )
    return Training(config, world)
