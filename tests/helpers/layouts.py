"""Trials of small models, called in worker processes, with gradients that a layout gets wrong."""

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch

from polyad.parallel import comm
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.train.config import parts
from polyad.train.config.run import RunConfig
from polyad.train.layout.trial import run_trial, save_again
from polyad.train.layout.verify import Difference, Reference, differences


def compared(
    config: RunConfig,
    theirs: Reference,
    folder: Path,
    spoiled: str | None = None,
    factor: float = 1.0,
) -> list[Difference]:
    """The trial on all processes, beside another one.

    Args:
        config: a small one.
        theirs: of one process.
        folder: for checkpoints.
        spoiled: a part of the names of parameters whose gradient is wrong on rank 1.
        factor: what it is multiplied by there.
    """
    degrees = config.parallel
    world = comm.initialize(
        tensor_parallel_size=degrees.tensor_parallel_size,
        expert_parallel_size=degrees.expert_parallel_size,
    )
    parallelize = parts.parallelize

    def wrongly(*arguments, **named):  # type: ignore[no-untyped-def]
        engine = parallelize(*arguments, **named)
        found = [p for name, p in engine.module.named_parameters() if spoiled in name]
        assert found
        for parameter in found if world.rank == 1 else ():
            parameter.register_hook(lambda gradient: gradient * factor)
        return engine

    with mock.patch.object(parts, "parallelize", wrongly) if spoiled else nullcontext():
        ours = run_trial(config, world, folder)
        again = save_again(config, world, theirs.trial.trained, folder)
    found = list(differences(config, ours, *theirs, Checkpoint(again))) if world.is_main else []
    torch.distributed.barrier()
    return found
