"""Gradients that say in which precision they were summed, called in worker processes."""

from typing import Any

import torch
from torch import Tensor, nn

from polyad.parallel import comm
from polyad.parallel.checkpoint.format import MASTER
from polyad.parallel.config import ParallelConfig
from polyad.parallel.parallelize import _allocate
from polyad.parallel.zero import DTYPES, STATE_TENSORS, Engine, deepspeed_config, fragments
from tests.helpers.training import Case, build_engine

SIZE = 61


class Linear(nn.Module):
    """One weight whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE, device="meta"))

    def forward(self, x_S: Tensor) -> Tensor:
        """The sum of all products, a loss."""
        return (self.weight * x_S).float().sum()


def settings(
    stage: int, precision: str, steps: int, num_parameters: int = SIZE, **keys: Any
) -> dict[str, Any]:
    """What DeepSpeed is told of an engine that adds up so many micro-batches of one sample."""
    return deepspeed_config(
        ParallelConfig(zero_stage=stage, **keys),
        precision=precision,
        micro_batch_size=1,
        accumulation_steps=steps,
        clip_grad_norm=0.0,
        num_parameters=num_parameters,
    )


def mean_gradient(stage: int, gradients: list[list[float]]) -> tuple[list[float], bool]:
    """The gradient that the optimizer gets from gradients of [micro-batch][rank] in bf16.

    Returns:
        Its distinct values here, and whether DeepSpeed's throughput timer runs.
    """
    world = comm.initialize()
    config = settings(stage, "bf16", len(gradients))
    module = Linear()
    _allocate(module, world, DTYPES["bf16"], config, None)
    engine = Engine(
        module,
        torch.optim.SGD([{"params": module.parameters(), STATE_TENSORS: ()}], lr=1.0),
        config,
        world=world,
        cross_entropy=lambda logits, targets: logits,
    )
    for of_ranks in gradients:
        x_S = torch.full((SIZE,), of_ranks[world.rank], dtype=torch.bfloat16)
        engine.backward(engine.deepspeed(x_S))
        engine.step(1.0)
    moved = -fragments(engine)["weight"].values[MASTER]
    return moved.unique().tolist(), engine.deepspeed.tput_timer.config.enabled


def rates_of_blocks(case: Case) -> list[tuple[str, float]]:
    """What share of the images stays in each block of a model in training, and its precision."""
    engine, _ = build_engine(case)
    shares = [block.drop_path.keep for block in engine.module.blocks]
    return [(str(share.dtype), share.item()) for share in shares]
