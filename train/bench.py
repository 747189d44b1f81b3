"""Times real steps of a configuration on random samples (`polyad bench`)."""

import functools
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel import comm
from polyad.parallel.source import InitialWeights
from polyad.train.config.adaptation import engine_of, model_of, random_micro_batches
from polyad.train.config.distillation import load_teacher
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig
from polyad.train.errors import ConfigError, RunError
from polyad.train.guard.stopping import explain_out_of_memory
from polyad.train.loop.metrics import peak_flops
from polyad.train.loop.profiling import Prefetch, allow_tf32, peak_memory_bytes
from polyad.train.loop.step import IssuedStep, issue_step
from polyad.train.tasks.distillation import BlockTeacher
from polyad.train.tasks.random_input import flops_of_unit, losses_for

LEARNING_RATE = 1e-4
"""Learning rate that is safe without warm-up; random samples teach nothing anyway."""
BEFORE = 2
"""Warm-up steps: in the first two DeepSpeed learns the order of parameters, and torch.compile
compiles."""


def random_steps(
    config: RunConfig,
    world: comm.World,
    number: int,
    *,
    balanced: bool = False,
) -> Iterator[IssuedStep]:
    """Trains on random samples, the same in each step.

    Args:
        config: configuration, completed with the values that the data determines.
        world: this process.
        number: number of steps.
        balanced: whether experts are forced to equal loads.

    Yields:
        Steps whose numbers are read after the next one is issued, as in the training loop.

    Raises:
        RunError: a gradient is not finite, so that a step did less work than others.
    """
    validate(config, world.size)
    allow_tf32(config.train.tf32, world.device)
    start = InitialWeights(model_of(config), config.seed)
    engine = engine_of(config, world, start)
    if balanced:
        force_equal_loads(engine.module)
    place = config.distill.teacher
    teacher = None if place is None else load_teacher(Path(place), config, world.device)
    if isinstance(teacher, BlockTeacher):
        teacher.attach_to(engine.module)
    losses_of = losses_for(config.model, teacher)
    batches = [
        type(batch)(*(part.pin_memory() for part in batch))
        if world.device.type == "cuda"
        else batch
        for batch in random_micro_batches(config, world, 0)
    ]
    pending = None
    for left in range(number, -1, -1):
        issued = None
        if left:
            issued = issue_step(
                engine,
                losses_of,
                Prefetch(iter(batches), world.device),
                len(batches),
                LEARNING_RATE,
                losses=config.loss,
                progress=0.5,
            )
        if pending is not None:
            _ = pending.statistics.numbers  # waits
            if not pending.result.applied:
                raise RunError("a step was skipped: its gradient is not finite")
            yield pending
        pending = issued


def time_steps(
    config: RunConfig, world: comm.World, steps: int, *, balanced: bool = False
) -> dict[str, float | None]:
    """Trains for some steps; all processes call it together.

    Args:
        config: configuration, completed with the values that the data determines.
        world: this process.
        steps: number of steps to time.
        balanced: whether experts are forced to equal loads.

    Returns:
        The same on each process, with times of rank 0, with which collectives synchronize the
        others: the median `seconds` of a step; `units_per_second`, in tokens or images over all
        processes; `mfu`, the share of the devices' peak rate, None if that is unknown, as on a CPU;
        `peak_memory_bytes` of a process, on a CPU including Python, its libraries and a compiler.

    Raises:
        RunError: memory ran out, or a gradient is not finite.
    """
    _begin_peak(world.device)
    with explain_out_of_memory(lambda: "timing steps", world):
        number = BEFORE + steps + 1  # the last one is under way at the end
        training = random_steps(config, world, number, balanced=balanced)
        ends = comm.from_main([time.perf_counter() for _ in training][BEFORE - 1 : -1])
    seconds = statistics.median(end - start for start, end in pairwise(ends))
    rate = config.train.global_batch_size * config.model.units_per_sample() / seconds
    peak, mfu = peak_flops(config.log, config.train.precision, tf32=config.train.tf32), None
    if peak is not None and config.distill.blocks is None:  # their FLOPs are not counted
        mfu = rate * flops_of_unit(config.model, config.data) / (peak * world.size)
    return {
        "seconds": seconds,
        "units_per_second": rate,
        "mfu": mfu,
        "peak_memory_bytes": comm.highest(peak_memory_bytes(world.device)),
    }


def _begin_peak(device: torch.device) -> None:
    """Resets the peak memory of this process."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # not every system allows this
            Path("/proc/self/clear_refs").write_text("5")


def force_equal_loads(model: nn.Module) -> None:
    """Permanently sends token i of a micro-batch to experts i K to i K + K - 1, modulo E.

    Expert loads are then equal, or differ by one token if E does not divide the number of
    assignments, so that a step takes the time of balanced routing. What such a model learns is
    meaningless. Weights are still computed from the scores.

    Args:
        model: not compiled yet.

    Raises:
        ConfigError: no layer of it selects experts.
    """
    selecting = [module for module in model.modules() if isinstance(module, SelectingMoE)]
    if not selecting:
        raise ConfigError(
            "--forced-balance: loads cannot be forced to be equal: no layer of the model selects "
            "experts"
        )
    for module in selecting:
        selection = module.router.selection
        selection.forced = functools.partial(_in_turn, num_experts=selection.num_experts)


def _in_turn(best_NK: Tensor, *, num_experts: int) -> Tensor:
    tokens, top_k = best_NK.shape
    assignments_A = torch.arange(tokens * top_k, device=best_NK.device)
    return assignments_A.remainder(num_experts).view(tokens, top_k)
