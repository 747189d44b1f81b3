"""The comparison of a layout with one process, and what it says."""

from pathlib import Path
from typing import Any, NamedTuple

from polyad.parallel import comm
from polyad.parallel.config import ParallelConfig
from polyad.train.config.run import RunConfig
from polyad.train.layout.compare import Difference, worst
from polyad.train.layout.small import norms_over_batch
from polyad.train.layout.trial import Trial, run_trial

KINDS = ("loss", "gradient norm", "gradient", "checkpoint")
NAMED = 10
"""Differences that the result names."""


def alone(config: RunConfig, data_parallel_size: int) -> RunConfig:
    """The same small configuration for one process, which shards nothing.

    Args:
        config: a small one.
        data_parallel_size: of the layout.
    """
    simple = ParallelConfig(zero_stage=0, timeout_minutes=config.parallel.timeout_minutes)
    train = config.train
    if norms_over_batch(config.model):
        # Its means are over what all processes have at once, so one process has as much at once.
        micro = train.micro_batch_size * data_parallel_size
        train = train.model_copy(update={"micro_batch_size": micro})
    return config.model_copy(update={"parallel": simple, "train": train})


class Reference(NamedTuple):
    """What one process computes."""

    trial: Trial
    nudged: Trial
    """The same from weights that one rounding has moved."""


def run_alone(config: RunConfig, folder: Path) -> Reference:
    """Computes the reference in this process, which is alone.

    Args:
        config: what `alone` gave.
        folder: for checkpoints.
    """
    world = comm.initialize()
    trials = [run_trial(config, world, folder / str(n), nudged=bool(n)) for n in range(2)]
    return Reference(*trials)


def result_of(small: RunConfig, world: comm.World, found: list[Difference]) -> dict[str, Any]:
    """The result as JSON values.

    Args:
        small: the configuration that was compared.
        world: this process.
        found: all differences.
    """
    wrong = [each for each in found if each.is_wrong]
    largest = {
        kind: {
            "compared": sum(each.kind == kind for each in found),
            "largest_difference": worst(found, kind).relative,
            "of": worst(found, kind).name,
        }
        for kind in KINDS
    }
    return {
        "processes": world.size,
        "data_parallel_size": world.data_parallel_size,
        "tensor_parallel_size": world.tensor_parallel_size,
        "expert_parallel_size": world.expert_parallel_size,
        "sequence_parallel": small.parallel.sequence_parallel,
        "expert_overlap": small.parallel.expert_overlap,
        "zero_stage": small.parallel.zero_stage,
        "device": world.device.type,
        "equal": not wrong,
        "differences": largest,
        "wrong": [each._asdict() for each in wrong[:NAMED]],
        "wrong_in_all": len(wrong),
    }
