"""Shared by tests on a GPU: marks, and calls in a worker process with the GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyad.parallel import comm
from polyad.train.loop.profiling import Prefetch
from polyad.train.loop.step import issue_step
from tests.helpers.training import Case, batches_of, build_engine, losses_of

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"
    ),
]
"""`pytestmark` of a file."""


def world() -> dict[str, Any]:
    """The process group of this worker, and a sum over it."""
    here = comm.initialize()
    total = comm.sum_over_ranks(torch.ones(3, device=here.device))
    return {
        "backend": dist.get_backend(),
        "device": str(here.device),
        "sum": total.tolist(),
        "everyone": comm.gather_to_main("here"),
    }


def run_expecting_memory_error(config: Path, *overrides: str) -> tuple[str, str, int]:
    """As `run_expecting_error`, and leaves the GPU's memory as free as it was."""
    from tests.helpers.runs import run_expecting_error

    try:
        return run_expecting_error(config, *overrides)
    finally:
        torch.cuda.empty_cache()


def wait_nowhere(case: Case) -> list[bool]:
    """Takes steps in which any operation that waits for the GPU raises an error, but for those of
    DeepSpeed's optimizer step, which asks for a norm.

    Returns:
        Whether each step was applied.
    """
    engine, world = build_engine(case)
    losses = losses_of(case)
    step = engine.step

    def waiting_step(*given: Any, **named: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return step(*given, **named)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    engine.step = waiting_step  # type: ignore[method-assign]
    applied, mode = [], "default"
    for number in range(3):
        batches = batches_of(number, world, case)
        ahead = Prefetch(iter(batches), world.device)
        mode = "error" if number else "default"  # the first step asks for kernels and memory
        torch.cuda.set_sync_debug_mode(mode)
        try:
            issued = issue_step(
                engine, losses, ahead, len(batches), case.learning_rate, losses=case.losses
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        applied.append(issued.result.applied)
    return applied
