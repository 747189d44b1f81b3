"""Damages a weight on one process, like a flipped bit in memory."""

from typing import Any

import torch

from polyad.train.guard.spikes import Limits
from polyad.train.loop.step import train_step
from polyad.train.tasks.language import text_losses
from tests.helpers.training import Case, build_engine, text_batches


def step_with_a_damaged_weight(case: Case) -> dict[str, Any]:
    """Runs a step after the last rank's copy, or shard, of a weight was set to a huge value."""
    engine, world = build_engine(case)
    high = Limits(1e30, 1e30)  # neither loss nor norm exceeds them
    before = train_step(
        engine, text_losses, text_batches(0, world, case.model), 2, 0.01, limits=high
    )
    if world.rank == world.size - 1:
        weight = engine.module.blocks[0].attention.qkv.weight
        getattr(weight, "ds_tensor", weight).data.view(-1)[3] = 1e12
    batches = text_batches(1, world, case.model)
    after = train_step(engine, text_losses, batches, 2, 0.01, limits=high)
    return {
        "sane": [before.sane, after.sane],
        "applied": [before.result.applied, after.result.applied],
        "largest": engine.largest_weight(),
        "finite": bool(torch.tensor(before.loss).isfinite()),
    }
