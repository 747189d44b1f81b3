"""What a run reports: the console line, metrics.jsonl and TensorBoard, the same numbers."""

import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import numpy as np
import torch
from pydantic import Field

from model.config import Config
from train.loop.routing import console_summary
from train.loop.startup import PREFIX, Startup, startup_line

# Dense peak rates in TFLOP/s as vendors state them: (bf16, fp32, TF32). A V100 has no TF32, and of
# the 125 tensor-core TFLOP/s that are stated for it, fp16 has them.
DEVICE_PEAKS: dict[str, tuple[float, float, float]] = {
    "v100": (125.0, 15.7, 15.7),
    "a100": (312.0, 19.5, 156.0),
    "h100": (989.0, 67.0, 494.0),
    "h200": (989.0, 67.0, 494.0),
    "b200": (2250.0, 80.0, 1125.0),
}


class ProfileConfig(Config):
    """A torch profiler trace of a few steps, written to `profile/` in the run folder."""

    first_step: Annotated[int, Field(ge=1)] = 3
    """The first step that is traced; earlier ones warm up."""
    num_steps: Annotated[int, Field(ge=0)] = 0
    """How many steps are traced; 0 traces none."""


class LogConfig(Config):
    """What a run reports."""

    every: Annotated[int, Field(ge=1)] = 1
    """Steps between console lines, and between records of every single expert; of all else
    metrics.jsonl and TensorBoard get every step."""
    tensorboard: bool = True
    """Whether `tensorboard/` is written."""
    device: Literal["auto", "v100", "a100", "h100", "h200", "b200"] = "auto"
    """Whose peak rate MFU refers to; auto: the GPU in use, and none on a CPU."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of one device in TFLOP/s, instead of a named device's."""
    fluctuation: bool = False
    """Whether each checkpoint's record says which tokens changed experts since the one before."""
    fluctuation_tokens: Annotated[int, Field(ge=1)] = 16_384
    """Tokens of the validation split that are compared, in whole windows evenly over it."""
    profile: ProfileConfig = ProfileConfig()


def peak_flops(config: LogConfig, precision: str, *, tf32: bool = False) -> float | None:
    """Peak rate of one process's device in FLOP/s; None where it is not known (any CPU).

    Args:
        config: what names the device.
        precision: of weights and activations.
        tf32: whether fp32 products are made in TF32.
    """
    if config.peak_tflops is not None:
        return config.peak_tflops * 1e12
    name: str = config.device
    if name == "auto":
        if not torch.cuda.is_available():
            return None
        full = torch.cuda.get_device_name().lower()
        name = next((known for known in DEVICE_PEAKS if known in full), "")
    peaks = DEVICE_PEAKS.get(name)
    if peaks is None:
        return None
    bf16, fp32, with_tf32 = peaks
    return 1e12 * (bf16 if precision == "bf16" else with_tf32 if tf32 else fp32)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: on the GPU if it uses one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would begin with what the parent process held
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


class Metrics:
    """Writes the record of every step. Only the main process makes one.

    Args:
        folder: the run's.
        config: what is reported.
        done_steps: steps of the checkpoint that the run goes on from; later records are dropped.
        total_steps: of the run.
        startup: what the first record says of the start; None says nothing.
    """

    def __init__(
        self,
        folder: Path,
        config: LogConfig,
        done_steps: int,
        total_steps: int,
        startup: Startup | None = None,
    ) -> None:
        self._config, self._total = config, total_steps
        self._startup = startup
        self._clock = Clock(done_steps, total_steps)
        self._folder = folder
        self._console = Console(sys.stderr)
        self._open(done_steps)

    def _open(self, done_steps: int) -> None:
        path = self._folder / "metrics.jsonl"
        drop_records_after(path, done_steps)
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._writer = None
        if self._config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard drops what was written before at this step and after it.
            self._writer = SummaryWriter(self._folder / "tensorboard", purge_step=done_steps + 1)

    def go_back(self, done_steps: int) -> None:
        """Drops the records of later steps, which will be done again.

        Args:
            done_steps: of the checkpoint that the run went back to.
        """
        self.close()
        self._clock = Clock(done_steps, self._total)
        self._open(done_steps)

    def say(self, line: str) -> None:
        """Prints a line that stays, between those of steps."""
        self._console.end()
        self._console.show(line)
        self._console.end()

    def write(self, record: dict[str, Any]) -> None:
        """Adds a step's record everywhere.

        Args:
            record: JSON values by name, `step` among them. Numbers that are not finite become null
                in the file, since JSON has no way to write them. Lists, one number an expert, are
                written with the console's lines alone: they are most of a record.
        """
        step = record["step"]
        due = step % self._config.every == 0 or step == self._total or "validation_loss" in record
        if not due:
            record = {name: value for name, value in record.items() if not isinstance(value, list)}
        if self._startup is not None:
            start = self._startup.record(record["step_seconds"])
            self._startup = None
            record = record | start
            line = startup_line(start)
            if self._writer is not None:
                self._writer.add_text("startup", line, step)
            self._console.show(line)
            self._console.end()
        self._file.write(json.dumps(json_number(record)) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in record.items():
                if name.startswith(PREFIX):  # one number a start is no curve: it is a text
                    continue
                if isinstance(value, list):
                    if all(map(math.isfinite, value)):
                        self._writer.add_histogram(name, np.asarray(value), step)
                elif name != "step" and isinstance(value, int | float) and math.isfinite(value):
                    self._writer.add_scalar(name, value, step)
        if due:
            self._console.show(console_line(record, self._total, self._clock.left(step)))

    def close(self) -> None:
        """Flushes everything to its file."""
        self._console.end()
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def drop_records_after(path: Path, step: int) -> None:
    """Cuts metrics.jsonl behind a step, and a last line that a crash left unfinished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, RecursionError, KeyError, TypeError):
            continue
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)


class Clock:
    """Time left, from the steps that this process did."""

    def __init__(self, done: int, total: int) -> None:
        self._start, self._done, self._total = time.monotonic(), done, total

    def left(self, done: int) -> float:
        """Seconds until all steps are done, at the rate so far; NaN before the first one."""
        if done <= self._done:
            return float("nan")
        rate = (time.monotonic() - self._start) / (done - self._done)
        return rate * (self._total - done)


class Console:
    """One line that renews itself on a terminal, or a line each in a file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._shown = 0

    def show(self, line: str) -> None:
        """Prints a line, over the last one on a terminal."""
        if not self._live:
            print(line, file=self._stream, flush=True)
            return
        width = os.get_terminal_size(self._stream.fileno()).columns - 1
        print(
            "\r" + line[:width].ljust(min(self._shown, width)),
            end="",
            file=self._stream,
            flush=True,
        )
        self._shown = len(line[:width])

    def end(self) -> None:
        """Leaves the last line standing."""
        if self._live and self._shown:
            print(file=self._stream, flush=True)
        self._shown = 0


def console_line(record: dict[str, Any], total: int, seconds_left: float) -> str:
    """A step's record for a person: progress first, then what it costs."""
    step = record["step"]
    width = len(str(total))
    parts = [
        f"step {step:{width}}/{total} {bar(step / total)}",
        f"loss {record['loss']:.4f}",
        f"norm {record['grad_norm']:.2f}",
        f"lr {record['learning_rate']:.2e}",
        f"{record['tokens_per_second']:,.0f} tok/s",
    ]
    if record.get("mfu") is not None:
        parts.append(f"mfu {100 * record['mfu']:.1f}%")
    parts.append(f"{record['memory_bytes'] / 2**30:.2f} GiB")
    if "validation_loss" in record:
        parts.append(f"val {record['validation_loss']:.4f}")
    parts += console_summary(record)
    if record["skipped"]:
        parts.append(f"SKIPPED ({record['skipped_steps']} so far)")
    parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def bar(share: float, width: int = 16) -> str:
    """A progress bar."""
    full = min(width, int(share * width))
    return "[" + "#" * full + "-" * (width - full) + "]"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def json_number(value: Any) -> Any:
    """A JSON value with null for the numbers that JSON cannot write, however deep they are."""
    if isinstance(value, dict):
        return {name: json_number(each) for name, each in value.items()}
    if isinstance(value, list):
        return [json_number(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
