"""A quickstart: the whole way once, from data to a score, with a table at the end.

data -> two processes train half way, and end -> two new ones go on -> a score

One that was stopped before its end goes on where it was; after its end it begins anew.
"""

import json
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from polyad.launch.child import STOPPED, polyad
from polyad.launch.cli import run as run_command
from polyad.train.errors import stopped
from polyad.train.records import last_loss, median_rate, peak_memory, read_records
from polyad.train.results import aligned

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
OURS = frozenset(
    {
        ".lease",
        ".lock",
        ".watch",
        "checkpoints",
        "collectives",
        "config.yaml",
        "environment.json",
        "launch",
        "metrics.jsonl",
        "profile",
        "report.html",
        "spikes.jsonl",
        "stalls.txt",
        "tensorboard",
        "wandb",
    }
)
"""What a run folder holds; a folder with anything else is not deleted."""


class StepFailed(Exception):
    """A step of the quickstart failed; its command printed the error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Journey(ABC):
    """A quickstart.

    Args:
        config: of the run, relative to the clone.
        folder: that everything is written below, relative to the clone.
        overrides: `key=value` for the configuration.
    """

    prepares: str
    """What becomes what, for people."""
    trains: str
    """The model, for people."""
    compares: str
    """What the score stands beside."""

    def __init__(self, config: Path, folder: Path, overrides: tuple[str, ...] = ()) -> None:
        self.config, self.overrides = config, overrides
        self.data, self.run = folder / "data", folder / "run"
        self.result = folder / "validation.json"

    @abstractmethod
    def prepare_arguments(self) -> list[str]:
        """The arguments of `polyad prepare`."""

    @abstractmethod
    def finish(self, result: dict[str, Any], half: int) -> list[tuple[str, str]]:
        """Compares the score, and says what came out.

        Args:
            result: what `polyad evaluate` wrote.
            half: the step that the run went on from.

        Returns:
            Names and values of a table.
        """

    def main(self) -> int:
        """Runs the quickstart; all that it writes lies below its folder in the clone.

        Returns:
            The exit status of the first step that failed, 0 if none did.
        """
        os.chdir(ROOT)
        started = time.monotonic()
        try:
            rows = self._steps()
        except StepFailed as error:
            return error.status
        rows.append(("time", f"{time.monotonic() - started:.0f} s"))
        print("\n".join(["", *aligned(rows, "<")]), flush=True)
        return 0

    def _steps(self) -> list[tuple[str, str]]:
        from polyad.train.config.run import load_config

        config = load_config(self.config, self.overrides)
        half = config.checkpoint.every
        begun = step_to_go_on_from(self.run, self.result)
        if not begun:
            remove_previous_run(self.run)
            self.result.unlink(missing_ok=True)
        say(f"1/5  prepare: {self.prepares}")
        if status := run_command(["prepare", *self.prepare_arguments()]):
            raise StepFailed(status)
        if begun and not self._goes_on():
            remove_previous_run(self.run)
            begun = 0
        say(
            f"2/5  train {self.trains} whose experts are spread over {PROCESSES} processes, "
            f"ZeRO 1, to step {half}"
        )
        processes = ("--processes-per-node", str(PROCESSES))
        launch = ("launch", str(self.config), *processes, *self.overrides)
        if begun < half:
            # The learning rate is that of the whole run, so that its second half changes nothing.
            decay = f"schedule.decay_steps={config.schedule.decay_steps or config.train.steps}"
            run_polyad(*launch, f"train.steps={half}", decay)
        else:
            print(f"nothing is left to do of that: {begun:,} steps are done", file=sys.stderr)
        say(f"3/5  go on in {PROCESSES} new processes from the sharded checkpoint of step {half}")
        run_polyad(*launch)
        say("4/5  evaluate on the validation split")
        run_polyad("evaluate", str(self.run), "--json", str(self.result))
        say(f"5/5  {self.compares}")
        return self.finish(json.loads(self.result.read_text(encoding="utf-8")), half)

    def _goes_on(self) -> bool:
        """Whether the existing run has this configuration and data."""
        from polyad.train.config.plan import plan_run

        try:
            plan_run(self.config, self.overrides, PROCESSES)
        except ValueError as error:
            say(f"the run that is there cannot go on, and is removed: {error}")
            return False
        return True


def run_polyad(*arguments: str) -> None:
    """Runs a command in a process of its own, so that commands share nothing but files.

    Raises:
        StepFailed: it failed.
        Stopped: or KeyboardInterrupt: a signal asked it or this process to stop.
    """
    status = polyad(*arguments)
    if status in STOPPED:
        raise stopped(status - 128, "the same command goes on with this run")
    if status:
        raise StepFailed(status)


def step_to_go_on_from(run: Path, result: Path) -> int:
    """The step of a run that was stopped before its end; 0 if it came there, or there is none.

    Args:
        run: its folder.
        result: what the last of the quickstart's steps but one writes.
    """
    from polyad.parallel.checkpoint.keeping import complete_checkpoints

    found = [] if result.exists() else complete_checkpoints(run / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0


def remove_previous_run(folder: Path) -> None:
    """Deletes a run folder, if it is nothing else.

    Args:
        folder: where the quickstart's run is going to be.

    Raises:
        ConfigError: it holds something that no run writes.
    """
    from polyad.train.errors import ConfigError

    if not folder.exists():
        return
    others = sorted({entry.name for entry in folder.iterdir()} - OURS)
    if others or not (folder / "config.yaml").is_file():
        found = f"holds {others[0]}" if others else "has no config.yaml"
        raise ConfigError(f"{folder}: {found}, so it is not a run; move it away")
    shutil.rmtree(folder)


def run_rows(run: Path, half: int, unit: str) -> list[tuple[str, str]]:
    """What every quickstart shows of its run.

    Args:
        run: the run's folder.
        half: the step it went on from.
        unit: what throughput counts.

    Returns:
        Names and values.
    """
    records = read_records(run)
    rate = median_rate(records, unit)
    return [
        *_routing_rows(records[-1]),
        ("speed", f"{rate:,.0f} {unit}s/s in training, {PROCESSES} processes"),
        ("peak memory", f"{peak_memory(records) / 2**30:.2f} GiB a process"),
        ("went on", f"at step {half:,} in new processes, from {_checkpoint(run, half)}"),
        ("run folder", f"{run}"),
        ("curves", f"{_tensorboard()} --logdir {run / 'tensorboard'}"),
    ]


def model_rows(run: Path, unit: str) -> list[tuple[str, str]]:
    """The size of the model, and how its loss fell.

    Args:
        run: the run's folder.
        unit: what throughput counts.

    Returns:
        Names and values.
    """
    from polyad.train.config.rules import validate
    from polyad.train.config.run import load_config
    from polyad.train.forecast.describe import describe, size_in_words

    records = read_records(run)
    config = load_config(run / "config.yaml")
    model = describe(config, validate(config, PROCESSES))["model"]
    first, last = records[0]["loss"], last_loss(records)
    return [
        ("model", size_in_words(model["parameters"], model["active_parameters"], unit)),
        ("training loss", f"{first:.3f} at first, {last:.3f} over the last 10 steps"),
    ]


def _routing_rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of routing statistics of a step; none for a dense model."""
    rows = []
    if "routing/load_max" in record:
        unused = 100 * record["routing/unused"]
        rows.append(
            (
                "expert load",
                f"busiest expert {record['routing/load_max']:.2f} times the mean, "
                f"{unused:.0f}% unused",
            )
        )
    if "routing/effective_neighbours" in record:
        rows.append(
            (
                "token graph",
                f"each token's routing averages over about "
                f"{record['routing/effective_neighbours']:.0f} similar tokens",
            )
        )
    return rows


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def _tensorboard() -> str:
    command = Path(sys.executable).parent / "tensorboard"
    return os.path.relpath(command) if command.is_relative_to(Path.cwd()) else "tensorboard"


def say(line: str) -> None:
    """Says which step begins."""
    print(f"\n== {line}", file=sys.stderr, flush=True)
