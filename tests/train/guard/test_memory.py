"""Out of memory, for real: child processes with few addresses end with one line of advice."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from polyad.train.guard.stopping import SMALLER, is_out_of_memory
from tests.helpers.runs import run

ROOT = Path(__file__).resolve().parents[3]
LIMIT = "1.5"  # GiB beside the libraries; a small run and the stacks of its threads take a third


INNER = ("model.feed_forward.hidden_size=200000", "train.micro_batch_size=72")
"""72 samples x 32 tokens x 2e5 inner units x 4 bytes = 1.7 GiB; weights and moments take 0.4."""
ONE = ("train.global_batch_size=1", "train.micro_batch_size=1", "train.steps=1")
CASES = {
    "in step 1, on rank 0 of 1": (*INNER, "train.global_batch_size=72"),
    "in step 1, on rank 1 of 2": (*INNER, "train.global_batch_size=144"),
    "in validation, on rank 0 of 1": (
        *ONE, "model.feed_forward.hidden_size=50000", "evaluation.max_windows=null",
        "evaluation.batch_size=360",
    ),
    # 15e6 x 32 x 4 bytes of embedding: 1.8 GiB.
    "building the engine, on rank 0 of 1": ("model.vocab_size=15000000",),
}  # fmt: skip


def line_of(rank: int, *arguments: object, processes: int = 1) -> str:
    """The one error of a command that fails, whose process RANK may have LIMIT GiB more."""
    words = ["-m", "tests.helpers.limited", LIMIT, str(rank), *map(str, arguments)]
    if processes > 1:
        torchrun = ("polyad.launch.torchrun", "--standalone", "--nproc-per-node", str(processes))
        words = ["-m", *torchrun, *words]
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    environment = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=ROOT,
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "polyad: error: " in line]
    assert SMALLER in line
    return line


@pytest.mark.slow
@pytest.mark.parametrize("where", CASES)
def test_what_does_not_fit_is_one_line_of_the_rank_that_fails(config: Path, where: str) -> None:
    processes = int(where[-1])  # the other one does not wait: a collective would for 30 minutes
    line = line_of(processes - 1, "train", config, *CASES[where], processes=processes)
    assert f"out of memory {where}: " in line
    if where == "in step 1, on rank 0 of 1":
        assert str(72 * 32 * 200_000 * 4) in line  # bytes


@pytest.mark.slow
@pytest.mark.distributed
def test_going_on_and_evaluating_know_the_run(workers, config: Path, tmp_path: Path) -> None:
    inner = (INNER[0], "train.global_batch_size=72", "evaluation.max_windows=null")
    few = ("train.micro_batch_size=4", "train.steps=1", "evaluation.max_windows=1")
    workers(1).run(run, config, *inner, *few)
    assert "in step 2, on rank 0" in line_of(0, "train", config, *inner, INNER[1])
    line = line_of(0, "evaluate", tmp_path / "run", "evaluation.batch_size=90")
    assert "out of memory evaluating validation, on rank 0 of 1: " in line


@pytest.mark.parametrize(
    "allocate",
    [lambda: torch.empty(2**60), lambda: bytearray(2**60), lambda: np.empty(2**57)],
    ids=["torch", "python", "numpy"],
)
def test_errors_of_every_allocator_are_told_from_others(allocate) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert is_out_of_memory(caught.value)
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(other.value)
