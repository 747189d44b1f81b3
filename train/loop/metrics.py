"""Metrics of a run: the same numbers on the console, in metrics.jsonl and in trackers.

The records of metrics.jsonl, one line per step, are also read and summarized here.

Trackers are TensorBoard, Weights & Biases and Trackio. One cannot end a run: if it fails, it is
dropped with a message.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from pydantic import Field

from polyad.data.files import named, write_whole
from polyad.model.config import Config
from polyad.train.errors import ConfigError, one_line
from polyad.train.guard.run_folder import gone
from polyad.train.loop.profiling import ProfileConfig
from polyad.train.results import Console, bar, duration, json_value
from polyad.train.tasks.task import Unit

METRICS_FILE = "metrics.jsonl"
Records: TypeAlias = Sequence[dict[str, Any]]
LAST = 10
"""Number of last records over which final values are averaged, since single steps vary."""
TrackerName = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "polyad"
"""The default project, unless the environment sets `WANDB_PROJECT` or `TRACKIO_PROJECT`."""
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
    trackers: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ("tensorboard",)
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
        full = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
        name = next((device for device in PEAKS if device in full), "")
    if name not in PEAKS:
        return None
    bf16, fp32, with_tf32 = PEAKS[name]
    return 1e12 * (bf16 if precision == "bf16" else with_tf32 if tf32 else fp32)


class TensorBoard:
    """Event files in the run's folder `tensorboard/`.

    Args:
        folder: the run's folder.
        done_steps: the step that the run continues from; later entries are void.
    """

    def __init__(self, folder: Path, done_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder / "tensorboard"
        # TensorBoard drops earlier records of this step and of later ones.
        self._writer = SummaryWriter(folder / "tensorboard", purge_step=done_steps + 1)

    def log(self, step: int, numbers: dict[str, float], lists: dict[str, list[float]]) -> None:
        """Adds the numbers of a step.

        Args:
            step: its number.
            numbers: by name; all are finite.
            lists: one number per expert, by name; all are finite.
        """
        with named(self._folder):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
            for name, values in lists.items():
                self._writer.add_histogram(name, np.asarray(values), step)

    def close(self) -> None:
        """Writes what is still buffered, and closes."""
        with named(self._folder):
            self._writer.close()


class Experiment:
    """A run of Weights & Biases or of Trackio, which has its calls; the same at every restart.

    Args:
        name: `wandb`, offline without an API key; or `trackio`, on this machine or where its own
            settings say.
        folder: the run's folder.
        about: its configuration, as JSON values.
    """

    def __init__(self, name: str, folder: Path, about: Mapping[str, Any]) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._library: Any = importlib.import_module(name)
            place = folder.absolute()
            options: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
            if name == "wandb":
                is_offline = "WANDB_MODE" not in os.environ and not self._library.api.api_key
                options = {
                    "id": hashlib.sha256(str(place).encode()).hexdigest()[:16],
                    "dir": folder,
                    "mode": "offline" if is_offline else None,
                    "settings": self._library.Settings(silent=True, console="off"),
                }
            self._library.init(
                project=os.environ.get(f"{name.upper()}_PROJECT", PROJECT),
                name=place.name,
                config=dict(about),
                resume="allow",
                **options,
            )

    def log(self, step: int, numbers: dict[str, float], lists: dict[str, list[float]]) -> None:
        """Adds the numbers of a step and histograms of lists. Weights & Biases leaves out a step
        that a restart repeats."""
        histograms = {name: self._library.Histogram(values) for name, values in lists.items()}
        self._library.log({**numbers, **histograms}, step=step)

    def close(self) -> None:
        """Sends what is still buffered, and closes."""
        with contextlib.redirect_stdout(sys.stderr):
            self._library.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Checks that the trackers' packages are installed.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.trackers: {name} is not installed: pip install {name}, or leave it out"
            )


class Metrics:
    """Writes the record of every step; exists only on the main process.

    Args:
        folder: the run's folder.
        config: what to report.
        done_steps: steps of the checkpoint that the run continues from; later records are dropped.
        total_steps: steps of the whole run.
        unit: the unit of throughput.
        validation_score: the most important key of a validation.
        about: the run's configuration, as JSON values, for trackers that show it.
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
        about: Mapping[str, Any],
    ) -> None:
        self._every, self._total, self._done = config.every, total_steps, done_steps
        self._unit, self._validation_score = unit, validation_score
        self._start = time.monotonic()
        self._rates = list[float]()
        """Rates of the steps since the last console line."""
        self._folder, self._path = folder, folder / METRICS_FILE
        self._console = Console(sys.stderr)
        drop_records_after(self._path, done_steps)
        self._trackers: dict[str, TensorBoard | Experiment] = {}
        for name in config.trackers:
            with self._kept_going(name):
                if name == "tensorboard":
                    self._trackers[name] = TensorBoard(folder, done_steps)
                else:
                    self._trackers[name] = Experiment(name, folder, about)

    @contextlib.contextmanager
    def _kept_going(self, name: str) -> Iterator[None]:
        """Drops a tracker that fails, except for a full disk, which concerns the whole run."""
        try:
            yield
        except Exception as error:
            if name == "tensorboard" and isinstance(error, OSError):
                raise
            self._trackers.pop(name, None)
            line = f"log.trackers: {name} failed and is no longer used: {one_line(error)}"
            print(f"polyad: warning: {line}", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Prints a permanent line between those of steps."""
        self._console.end()
        self._console.show(line)
        self._console.end()

    def write(self, record: dict[str, Any]) -> None:
        """Writes a step's record to all outputs.

        Args:
            record: JSON values by name, including `step`. Numbers that are not finite become null
                in the file, since JSON cannot represent them. Lists (one number per expert) are
                written only in steps with a console line, because they are most of a record.

        Raises:
            OSError: It could not be written.
            RunError: The run's folder is gone.
        """
        step, rate = record["step"], f"{self._unit.name}s_per_second"
        self._rates.append(record[rate])
        due = is_due(step, self._every, self._total) or self._validation_score in record
        if not due:
            record = {name: value for name, value in record.items() if not isinstance(value, list)}
        try:
            with named(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(json_value(record)) + "\n")
        except FileNotFoundError:
            raise gone(self._folder) from None
        if due:
            self._track(record)
            seconds = (time.monotonic() - self._start) / (step - self._done)
            left = seconds * (self._total - step)
            shown = record | {rate: statistics.harmonic_mean(self._rates)}
            self._rates.clear()
            line = console_line(shown, self._total, left, self._unit, self._validation_score)
            self._console.show(line)

    def _track(self, record: Mapping[str, Any]) -> None:
        """Sends a record to each tracker, except values other than finite numbers and lists of
        them."""
        numbers, lists = {}, {}
        for name, value in record.items():
            if isinstance(value, list):
                if value and all(map(math.isfinite, value)):
                    lists[name] = value
            elif name != "step" and isinstance(value, int | float) and math.isfinite(value):
                numbers[name] = value
        for name, tracker in list(self._trackers.items()):
            with self._kept_going(name):
                tracker.log(record["step"], numbers, lists)

    def close(self) -> None:
        """Ends the console's line, and closes the trackers."""
        self._console.end()
        for name, tracker in list(self._trackers.items()):
            with self._kept_going(name):
                tracker.close()


def is_due(step: int, every: int, total: int) -> bool:
    """Whether something is due in a step: one of its multiples, or the run's last.

    Args:
        step: its number, from 1.
        every: steps from one time to the next; 0: only in the last.
        total: steps of the whole run.
    """
    return step == total or (every > 0 and step % every == 0)


def drop_records_after(path: Path, step: int) -> None:
    """Truncates metrics.jsonl after a step, and drops a last line that a crash left incomplete."""
    if path.exists():
        records = [record for record in records_of(path) if record["step"] <= step]
        write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


SHOWN = {
    "routing/load_max": "load {:.2f}x",
    "routing/unused": "unused {:.0%}",
    "routing/nmse": "nmse {:.4f}",
    "routing/effective_experts": "experts {:.1f}",
    "routing/dropped": "dropped {:.1%}",
    "routing/effective_neighbours": "neighbours {:.1f}",
    "fluctuation/top1": "changed {:.1%}",
}
"""Keys of a record that are part of a console line if they are not 0, and how."""


def console_line(
    record: dict[str, Any], total: int, seconds_left: float, unit: Unit, validation_score: str
) -> str:
    """Formats a step's record as a console line: progress first, then cost."""
    step, loss, width = record["step"], record["loss"], len(str(total))
    parts = [
        f"step {step:{width}}/{total} {bar(step / total)}",
        # The losses of distill.blocks may be small.
        f"loss {loss:.4f}" if not 0 < loss < 0.01 else f"loss {loss:.2e}",
        f"norm {record['grad_norm']:.2f}",
        f"lr {record['learning_rate']:.2e}",
        f"{record[f'{unit.name}s_per_second']:,.0f} {unit.short}/s",
    ]
    if record.get("mfu") is not None:
        parts.append(f"mfu {100 * record['mfu']:.1f}%")
    parts.append(f"{record['memory_bytes'] / 2**30:.2f} GiB")
    if validation_score in record:
        parts.append(f"val {record[validation_score]:.4f}")
    parts += [text.format(record[key]) for key, text in SHOWN.items() if record.get(key)]
    if record["skipped"]:
        parts.append(f"SKIPPED ({record['skipped_steps']} not finite so far)")
    parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields all records of a file, oldest first; other lines, such as an incomplete one, are
    skipped."""
    with path.open("rb") as file:
        for line in file:
            try:
                tree = json.loads(line)
            except ValueError:
                continue
            if isinstance(tree, dict) and type(tree.get("step")) is int and tree["step"] >= 0:
                yield tree


def read_records(run: Path) -> list[dict[str, Any]]:
    """Returns all records of a run's folder, oldest first.

    Raises:
        ConfigError: there is none.
    """
    path = run / METRICS_FILE
    if not path.is_file():
        raise ConfigError(f"{run}: has no {METRICS_FILE}, which `polyad train` writes")
    records = list(records_of(path))
    if not records:
        raise ConfigError(f"{path}: contains no record of a step yet")
    return records


def last_loss(records: Records) -> float:
    """The mean training loss of the last steps."""
    losses = [record["loss"] for record in records[-LAST:] if record["loss"] is not None]
    return statistics.fmean(losses) if losses else float("nan")


def median_rate(records: Records, unit: str = "token") -> float:
    """The median throughput of steps, in the task's units per second."""
    rates = [rate for record in records if (rate := record.get(f"{unit}s_per_second")) is not None]
    return float(statistics.median(rates)) if rates else math.nan


def peak_memory(records: Records) -> int:
    """The peak memory of one process, in bytes."""
    return max(int(record.get("memory_bytes") or 0) for record in records)


def last_routing(records: Records) -> dict[str, float]:
    """Routing statistics of all layers, averaged over the last steps.

    Args:
        records: a run's records.

    Returns:
        Each `routing/MEASURE`, and `routing/shared_experts`; empty for a dense model.
    """
    newest: dict[str, list[float]] = {}
    for record in records[-LAST:]:
        for key, value in record.items():
            if re.fullmatch("routing/[^/]+", key) and isinstance(value, int | float):
                newest.setdefault(key, []).append(float(value))
    means = {key: statistics.fmean(values) for key, values in newest.items()}
    return means | _shared_experts(records)


def _shared_experts(records: Records) -> dict[str, float]:
    """The effective number of experts used by the tokens of the last steps.

    Args:
        records: a run's records; only those of steps with a console line have loads.

    Returns:
        The exponential of the entropy of a layer's mean load, averaged over layers: from 1 to the
        number of experts (for a hierarchy the product over levels). Empty for a dense model.
    """
    last = [record for record in records[-LAST:] if any(map(_is_load, record))]
    each = []
    for key in filter(_is_load, last[-1] if last else ()):
        loads = zip(*(record[key] for record in last), strict=True)
        shares = [statistics.fmean(values) for values in loads]
        each.append(math.exp(-math.fsum(p * math.log(p) for p in shares if p > 0)))
    return {"routing/shared_experts": statistics.fmean(each)} if each else {}


def last_fluctuation(records: Records) -> dict[str, float]:
    """Returns the shares of tokens that changed experts between the last two checkpoints.

    Args:
        records: a run's records; those at checkpoints have it with `log.fluctuation: true`.

    Returns:
        Shares of the probe set, averaged over layers: `fluctuation/top1`, with a different first
        expert, and `fluctuation/set`, with a different set. Empty if nothing was logged.
    """
    for record in reversed(records):
        if "fluctuation/top1" in record:
            return {key: float(record[key]) for key in ("fluctuation/top1", "fluctuation/set")}
    return {}


def _is_load(key: str) -> bool:
    return key.startswith("routing/") and key.endswith("/load")
