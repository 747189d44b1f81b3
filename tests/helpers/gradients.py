"""Gradients that say in which precision they were summed, called in worker processes."""

from traceback import extract_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyad.parallel import comm
from polyad.parallel.checkpoint.format import MASTER
from polyad.parallel.config import ParallelConfig
from polyad.parallel.parallelize import _allocate
from polyad.parallel.zero import DTYPES, Engine, deepspeed_config, fragments
from tests.helpers.training import Case, build_engine, take_step

SIZE = 61


class Linear(nn.Module):
    """One weight whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE, device="meta"))

    def forward(self, x_S: Tensor) -> Tensor:
        """The sum of all products, a loss."""
        return (self.weight * x_S).float().sum()


def mean_gradient(stage: int, gradients: list[list[float]]) -> tuple[list[float], bool]:
    """The gradient that the optimizer gets from gradients of [micro-batch][rank] in bf16.

    Returns:
        Its distinct values here, and whether DeepSpeed's throughput timer runs.
    """
    world = comm.initialize()
    config = deepspeed_config(
        ParallelConfig(zero_stage=stage),
        precision="bf16",
        micro_batch_size=1,
        accumulation_steps=len(gradients),
        clip_grad_norm=0.0,
        num_parameters=SIZE,
    )
    module = Linear()
    _allocate(module, world, DTYPES["bf16"], config, None)
    engine = Engine(
        module,
        torch.optim.SGD(module.parameters(), lr=1.0),
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


class Exchanges(TorchDispatchMode):
    """The collectives of floating-point numbers, by name and precision."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[tuple[str, str], int] = {}
        self.in_backward: dict[str, int] = {}
        """Calls while the backward pass goes on, by name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2].rstrip("_")
        if "c10d" in func.namespace and not name.endswith(("wait_tensor", "barrier")):
            first = args[0]
            while isinstance(first, list | tuple):
                first = first[0]
            if isinstance(first, Tensor) and first.is_floating_point():
                key = name, str(first.dtype).removeprefix("torch.")
                self.numbers[key] = self.numbers.get(key, 0) + first.numel()
                if any(frame.name == "_engine_run_backward" for frame in extract_stack()):
                    self.in_backward[name] = self.in_backward.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def calls_in_backward(case: Case) -> dict[str, int]:
    """Collectives of one training step that begin before its backward passes end, by name."""
    return _exchanges(case).in_backward


def _exchanges(case: Case) -> Exchanges:
    engine, world = build_engine(case)
    with Exchanges() as mode:
        take_step(engine, world, case, 0, losses=case.losses, progress=0.0)
    return mode


def rates_of_blocks(case: Case) -> list[tuple[str, float]]:
    """What share of the images stays in each block of a model in training, and its precision."""
    engine, _ = build_engine(case)
    shares = [block.drop_path.keep for block in engine.module.blocks]
    return [(str(share.dtype), share.item()) for share in shares]
