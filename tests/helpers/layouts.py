"""Trials of small models, called in worker processes, with gradients that a layout gets wrong."""

from pathlib import Path
from unittest import mock

import torch

from polyad.parallel import comm
from polyad.parallel.zero import RATE_FACTOR
from polyad.train.config import adaptation
from polyad.train.config.run import RunConfig
from polyad.train.loop.optimizer import WARMUP
from polyad.train.verify_layout import Difference, Trial, differences, run_trial


def compared(
    config: RunConfig,
    theirs: tuple[Trial, Trial],
    folder: Path,
    spoiled: str | None = None,
    factor: float = 1.0,
    *,
    still: str | None = None,
) -> list[Difference]:
    """The trial on all processes, beside another one.

    Args:
        config: a small one.
        theirs: of one process; see `trials_alone`.
        folder: for checkpoints.
        spoiled: a part of the names of parameters whose gradient is wrong on rank 1.
        factor: what it is multiplied by there.
        still: a part of the names of parameters that no optimizer moves.
    """
    degrees = config.parallel
    world = comm.initialize(
        tensor_parallel_size=degrees.tensor_parallel_size,
        expert_parallel_size=degrees.expert_parallel_size,
    )
    parallelize = adaptation.parallelize

    def moving_others(*arguments, make_optimizer, **named):  # type: ignore[no-untyped-def]
        def of(parameters):  # type: ignore[no-untyped-def]
            optimizer = make_optimizer([each for each in parameters if still not in each[0]])
            left = [parameter for name, parameter, _ in parameters if still in name]
            assert left
            first = optimizer.param_groups[0]
            optimizer.add_param_group(first | {"params": left, RATE_FACTOR: 0.0, WARMUP: (0.0, 0)})
            return optimizer

        return parallelize(*arguments, make_optimizer=of, **named)

    def wrongly(*arguments, **named):  # type: ignore[no-untyped-def]
        engine = parallelize(*arguments, **named)
        found = [p for name, p in engine.module.named_parameters() if spoiled in name]
        assert found
        for parameter in found if world.rank == 1 else ():
            parameter.register_hook(lambda gradient: gradient * factor)
        return engine

    other = wrongly if spoiled else moving_others if still else parallelize
    with mock.patch.object(adaptation, "parallelize", other):
        ours = run_trial(config, world, folder)
    found = list(differences(config, ours, *theirs)) if world.is_main else []
    torch.distributed.barrier()
    return found
