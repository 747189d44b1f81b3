"""Commands in background processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.runs import records, write_config

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {
    "train": {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2},
    "optimizer": {},
    "schedule": {"decay_steps": 4},
    "checkpoint": {"every": 2},
    "evaluation": {"max_windows": 8},
}
"""Changes of `write_config` with which a run is small enough to start often."""


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Starts a command in the clone, outside of any group of processes, whose output is kept.

    Args:
        command: its words.
        options: of `subprocess.Popen`.
    """
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, cwd=ROOT, env=_alone(), text=True, **kept)


def polyad(
    *arguments: object, module: str = "polyad.launch", timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command of `polyad` in the clone, outside of any group of processes.

    Args:
        arguments: its words.
        module: what Python runs.
        timeout: seconds.
        variables: of the environment, beside this one's.
    """
    words = [sys.executable, "-m", module, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": timeout, "cwd": ROOT}
    return subprocess.run(words, env=_alone() | variables, **options)


def _alone() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}}
    return environment | {"OMP_NUM_THREADS": "1"}


def wait_for(
    condition: Callable[[], object],
    *processes: subprocess.Popen[str],
    seconds: float = 180.0,
    said: Callable[[], str] = lambda: "nothing happened",
) -> None:
    """Polls; fails the test after a time, or where a process ends too early.

    Args:
        condition: what is waited for.
        processes: whose output is told where they end.
        seconds: that it may take.
        said: what explains why it did not come.
    """
    until = time.monotonic() + seconds
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, said()
        time.sleep(0.01)


def write_command(path: Path, text: str) -> None:
    """Writes a shell script that stands in for a program, as for a scheduler's."""
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def steps(run: Path) -> list[int]:
    """The step of each record."""
    return [record["step"] for record in records(run)]


def losses(run: Path) -> dict[int, float]:
    """The loss of each step."""
    return {record["step"]: record["loss"] for record in records(run)}


def write_run(folder: Path, data: Path, steps: int, every: int = 20) -> Path:
    """The configuration of a ZeRO 1 run with dropout, to be interrupted, that saves now and then.

    Args:
        folder: is made; the run's is `run` in it.
        data: its text.
        steps: of the run.
        every: steps between checkpoints, and between lines of the log.
    """
    changes = SMALL | {
        "model__dropout": 0.1,
        "train__steps": steps,
        "schedule": {"decay_steps": steps},
        "checkpoint": {"every": every},
        "parallel": {"zero_stage": 1, "timeout_minutes": 2.0},
        "log": {"every": every, "trackers": []},
    }
    return write_config(folder / "run.yaml", data, **changes)
