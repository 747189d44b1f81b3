"""Metrics of a run: the same numbers on the console, in metrics.jsonl and in trackers."""

import json
import math
import os
import sys
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import torch
from pydantic import Field, field_validator

from polyad.data.files import named, write_whole
from polyad.model.config import Config
from polyad.train.console import Clock, Console, bar, counted, duration
from polyad.train.guard.run_folder import gone
from polyad.train.loop.profiling import ProfileConfig
from polyad.train.loop.statistics import console_summary
from polyad.train.loop.trackers import TrackerName, Trackers
from polyad.train.records import METRICS_FILE, record_of
from polyad.train.results import json_value
from polyad.train.tasks.task import Unit

NOTHING: Mapping[str, Any] = {}
PEAKS: dict[str, tuple[float, float, float]] = {
    "v100": (125.0, 15.7, 15.7),
    "a100": (312.0, 19.5, 156.0),
    "h100": (989.0, 67.0, 494.0),
    "h200": (989.0, 67.0, 494.0),
    "b200": (2250.0, 80.0, 1125.0),
}
"""Dense peak rates in TFLOP/s from NVIDIA's data sheets for SXM modules: (bf16, fp32, TF32). A V100
has no TF32, and reaches the 125 tensor-core TFLOP/s in its data sheet only in fp16."""


class LogConfig(Config):
    """Logging: what a run reports, how often and where."""

    every: Annotated[int, Field(ge=1)] = 1
    """Number of steps between lines on the console, points in TensorBoard and records of routing
    statistics (except the largest loads). Everything else is written to metrics.jsonl at every
    step."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Where curves are sent in addition to metrics.jsonl: `tensorboard` (a folder inside the run
    folder), `wandb` or `trackio` (packages to install separately)."""
    device: Literal["auto", "v100", "a100", "h100", "h200", "b200"] = "auto"
    """Device whose peak FLOP rate is used for the MFU (model FLOPs utilization: the share of the
    peak rate that the model uses); auto: the GPU in use, and no MFU on a CPU."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of one device in TFLOP/s, which replaces that of `device`; null: that of
    `device`."""
    fluctuation: bool = False
    """Whether to record, at each checkpoint, the fraction of tokens whose experts changed since the
    checkpoint before."""
    fluctuation_tokens: Annotated[int, Field(ge=1)] = 16_384
    """Number of validation tokens that are compared for `fluctuation`, in whole windows spread
    evenly over the split."""
    profile: ProfileConfig = ProfileConfig()

    def is_due(self, step: int, *, done: bool) -> bool:
        """Whether a step is a multiple of `every`, or the run's last.

        Args:
            step: its number, from 1.
            done: whether it is the last.
        """
        return done or step % self.every == 0

    @field_validator("trackers", mode="before")
    @classmethod
    def _is_list(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


def peak_flops(config: LogConfig, precision: str, *, tf32: bool = False) -> float | None:
    """Peak rate of one process's device in FLOP/s; None if unknown (any CPU).

    Args:
        config: names the device.
        precision: precision of weights and activations.
        tf32: whether fp32 products use TF32.
    """
    if config.peak_tflops is not None:
        return config.peak_tflops * 1e12
    name: str = config.device
    if name == "auto":
        if not torch.cuda.is_available():
            return None
        full = torch.cuda.get_device_name().lower()
        name = next((device for device in PEAKS if device in full), "")
    peaks = PEAKS.get(name)
    if peaks is None:
        return None
    bf16, fp32, with_tf32 = peaks
    return 1e12 * (bf16 if precision == "bf16" else with_tf32 if tf32 else fp32)


class Metrics:
    """Writes the record of every step in a thread; exists only on the main process.

    Args:
        folder: the run's folder.
        config: what to report.
        done_steps: steps of the checkpoint that the run continues from; later records are dropped.
        total_steps: steps of the whole run.
        unit: the unit of throughput.
        validation_score: the most important key of a validation.
        about: the run's configuration, as JSON values, for trackers that show it.
        nodes: number of nodes; with several, the console also shows the rate per node.
    """

    def __init__(
        self,
        folder: Path,
        config: LogConfig,
        done_steps: int,
        total_steps: int,
        *,
        unit: Unit,
        validation_score: str,
        about: Mapping[str, Any] = NOTHING,
        nodes: int = 1,
    ) -> None:
        self._config, self._total = config, total_steps
        self._unit, self._validation_score, self._nodes = unit, validation_score, nodes
        self._clock = Clock(done_steps, total_steps)
        self._folder, self._path = folder, folder / METRICS_FILE
        self._console = Console(sys.stderr)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="polyad-metrics")
        self._writing: deque[Future[None]] = deque()
        drop_records_after(self._path, done_steps)
        self._file: TextIO = self._path.open("a", encoding="utf-8")
        self._trackers = Trackers(config.trackers, folder, about, done_steps)

    def say(self, line: str) -> None:
        """Prints a permanent line between those of steps."""
        self.flush()
        self._console.end()
        self._console.show(line)
        self._console.end()

    def write(self, record: dict[str, Any]) -> None:
        """Queues a step's record for all outputs; `flush` waits for them.

        Args:
            record: JSON values by name, including `step`. Numbers that are not finite become null
                in the file, since JSON cannot represent them. Lists (one number per expert) are
                written only in steps with a console line, because they are most of a record.

        Raises:
            OSError: An earlier record could not be written.
        """
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()
        self._writing.append(self._thread.submit(self._write, record))

    def flush(self) -> None:
        """Waits until every record is in its file.

        Raises:
            OSError: A record could not be written.
        """
        while self._writing:
            self._writing.popleft().result()

    def _write(self, record: dict[str, Any]) -> None:
        step = record["step"]
        due = (
            self._config.is_due(step, done=step == self._total) or self._validation_score in record
        )
        if not due:
            record = {name: value for name, value in record.items() if not isinstance(value, list)}
        with named(self._path):
            self._file.write(json.dumps(json_value(record)) + "\n")
            self._file.flush()
        self._check_place()
        if due:
            self._trackers.log(record)
            left = self._clock.left(step)
            score = self._validation_score
            line = console_line(record, self._total, left, self._unit, score, self._nodes)
            self._console.show(line)

    def _check_place(self) -> None:
        """Checks that the open file is still the one in the run's folder.

        Writes to a deleted file are lost without an error, and a checkpoint would recreate the
        folder without the rest of its files.

        Raises:
            RunError: the folder was removed, moved or replaced.
        """
        try:
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        except FileNotFoundError:
            pass
        raise gone(self._folder)

    def close(self) -> None:
        """Flushes everything to its file."""
        try:
            self.flush()
            self._console.end()
            with named(self._path):
                self._file.close()
            self._trackers.close()
        finally:
            self._thread.shutdown()


def drop_records_after(path: Path, step: int) -> None:
    """Truncates metrics.jsonl after a step, and drops a last line that a crash left incomplete."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines()
    records = [record_of(line) for line in lines]
    kept = [
        line.decode() + "\n"
        for line, record in zip(lines, records, strict=True)
        if record is not None and record["step"] <= step
    ]
    write_whole(path, "".join(kept))
    if damaged := sum(record is None for record in records[:-1]):
        print(
            f"polyad: warning: {path}: removed {counted(damaged, 'unreadable line')}",
            file=sys.stderr,
            flush=True,
        )


def in_digits(loss: float) -> str:
    """Formats a loss; those of distill.blocks may be small."""
    return f"{loss:.4f}" if not 0 < loss < 0.01 else f"{loss:.2e}"


def console_line(
    record: dict[str, Any],
    total: int,
    seconds_left: float,
    unit: Unit,
    validation_score: str,
    nodes: int = 1,
) -> str:
    """Formats a step's record as a console line: progress first, then cost."""
    step, rate = record["step"], record[f"{unit.name}s_per_second"]
    width = len(str(total))
    of_one = f" ({rate / nodes:,.0f} a node)" if nodes > 1 else ""
    parts = [
        f"step {step:{width}}/{total} {bar(step / total)}",
        f"loss {in_digits(record['loss'])}",
        f"norm {record['grad_norm']:.2f}",
        f"lr {record['learning_rate']:.2e}",
        f"{rate:,.0f} {unit.short}/s{of_one}",
    ]
    if record.get("mfu") is not None:
        parts.append(f"mfu {100 * record['mfu']:.1f}%")
    parts.append(f"{record['memory_bytes'] / 2**30:.2f} GiB")
    if validation_score in record:
        parts.append(f"val {record[validation_score]:.4f}")
    parts += console_summary(record)
    if record["skipped"]:
        numbers = (record["loss"], record["grad_norm"])
        is_spike = all(each is not None and math.isfinite(each) for each in numbers)
        parts.append(
            "SKIPPED (spike)" if is_spike else f"SKIPPED ({record['skipped_steps']} so far)"
        )
    parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)
