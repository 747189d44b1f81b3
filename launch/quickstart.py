"""`make quickstart`: the whole way once, from text to perplexity, with a table at the end.

text -> tokens -> two processes train half way, and end -> two new ones go on -> perplexity

One that was stopped before its end goes on where it was; after its end it begins anew.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from launch.child import STOPPED, polyad
from launch.cli import run as run_command
from launch.ending import guard
from launch.records import last_loss, median_rate, peak_memory, read_records
from launch.signals import stop_at_signals
from train.errors import stopped

ROOT = Path(__file__).resolve().parent.parent
CONFIG = Path("configs/quickstart/gpt2-smoe.yaml")
FOLDER = Path("runs/quickstart")
DATA, RUN, RESULT = FOLDER / "data", FOLDER / "run", FOLDER / "validation.json"
VOCAB_SIZE, PROCESSES = 8192, 2
OURS = frozenset(
    {
        "config.yaml",
        "metrics.jsonl",
        "environment.json",
        "report.html",
        "tensorboard",
        "checkpoints",
        "profile",
        ".lock",
        "launch",
    }
)
"""What a run folder holds; a folder with anything else is not deleted."""


class StepFailed(Exception):
    """A step of the quickstart failed; its command printed the error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def main() -> int:
    """Runs the quickstart; all that it writes lies below runs/quickstart in the clone.

    Returns:
        The exit status of the first step that failed, 0 if none did.
    """
    os.chdir(ROOT)
    started = time.monotonic()
    try:
        rows = _steps()
    except StepFailed as error:
        return error.status
    rows.append(("time", f"{time.monotonic() - started:.0f} s"))
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"{name:{width}}  {value}" for name, value in rows), flush=True)
    return 0


def _steps() -> list[tuple[str, str]]:
    from train.config.run import load_config

    half = load_config(CONFIG).checkpoint.every
    begun = step_to_go_on_from(RUN, RESULT)
    if not begun:
        remove_previous_run(RUN)
        RESULT.unlink(missing_ok=True)
    _say("1/5  prepare: Python's standard library -> a byte-level BPE -> tokens")
    _prepare()
    if begun and not _goes_on():
        remove_previous_run(RUN)
        begun = 0
    _say(
        f"2/5  train a GPT-2 whose experts are spread over {PROCESSES} processes, ZeRO 1, to step "
        f"{half}"
    )
    if begun < half:
        _polyad("launch", str(CONFIG), *_PROCESS_OPTIONS, f"train.steps={half}")
    else:
        print(f"nothing is left to do of that: {begun:,} steps are done", file=sys.stderr)
    _say(f"3/5  go on in {PROCESSES} new processes from the sharded checkpoint of step {half}")
    _polyad("launch", str(CONFIG), *_PROCESS_OPTIONS)
    _say("4/5  evaluate on the validation split")
    _polyad("evaluate", str(RUN), "--json", str(RESULT))
    _say("5/5  compare with a unigram model on the same tokens")
    return summary(RUN, DATA, json.loads(RESULT.read_text(encoding="utf-8")), half)


_PROCESS_OPTIONS = ("--processes-per-node", str(PROCESSES))


def _prepare() -> None:
    status = run_command(
        [
            *("prepare", "--source", "python-stdlib", "--tokenizer", f"train:{VOCAB_SIZE}"),
            *("--output", str(DATA), "--validation-fraction", "0.02", "--test-fraction", "0.02"),
            "--overwrite",  # the text depends on the version of Python
        ]
    )
    if status:
        raise StepFailed(status)


def _polyad(*arguments: str) -> None:
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
    from parallel.checkpoint.commit import complete_checkpoints

    found = [] if result.exists() else complete_checkpoints(run / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0


def _goes_on() -> bool:
    """Whether the existing run has this configuration and text."""
    from train.config.plan import plan_run

    try:
        plan_run(CONFIG, (), PROCESSES)
    except ValueError as error:
        _say(f"the run that is there cannot go on, and is removed: {error}")
        return False
    return True


def remove_previous_run(folder: Path) -> None:
    """Deletes a run folder, if it is nothing else.

    Args:
        folder: where the quickstart's run is going to be.

    Raises:
        ConfigError: it holds something that no run writes.
    """
    from train.errors import ConfigError

    if not folder.exists():
        return
    others = sorted({entry.name for entry in folder.iterdir()} - OURS)
    if others or not (folder / "config.yaml").is_file():
        found = f"holds {others[0]}" if others else "has no config.yaml"
        raise ConfigError(f"{folder}: {found}, so it is not a run; move it away")
    shutil.rmtree(folder)


def summary(run: Path, data: Path, result: dict[str, Any], half: int) -> list[tuple[str, str]]:
    """What the quickstart shows.

    Args:
        run: the run's folder.
        data: its prepared data.
        result: what `polyad evaluate` wrote.
        half: the step it went on from.

    Returns:
        Names and values.
    """
    from data.text.dataset import PreparedData
    from train.config.describe import describe
    from train.config.rules import validate
    from train.config.run import load_config
    from train.evaluation.unigram import unigram_perplexity

    records = read_records(run)
    prepared = PreparedData.open(data)
    unigram = unigram_perplexity(
        prepared.split("train"),
        prepared.split("validation"),
        prepared.manifest.tokenizer.vocab_size,
    )
    config = load_config(run / "config.yaml")
    model = describe(config, validate(config, PROCESSES))["model"]
    return [
        ("parameters", f"{model['parameters']:,}, of one token {model['active_parameters']:,}"),
        (
            "training loss",
            f"{records[0]['loss']:.3f} at first, {last_loss(records):.3f} over the last 10 steps",
        ),
        (
            "perplexity",
            f"{result['perplexity']:.1f} on {result['tokens_scored']:,} held-out tokens",
        ),
        ("of a unigram model", f"{unigram:.1f} on the same tokens"),
        ("bits per byte", f"{result['bits_per_byte']:.3f}"),
        *_routing_rows(records[-1]),
        ("speed", f"{median_rate(records):,.0f} tokens/s in training, {PROCESSES} processes"),
        ("peak memory", f"{peak_memory(records) / 2**30:.2f} GiB a process"),
        ("went on", f"at step {half:,} in new processes, from {_checkpoint(run, half)}"),
        ("run folder", f"{run}"),
        ("curves", f"{_tensorboard()} --logdir {run / 'tensorboard'}"),
    ]


def _routing_rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of routing statistics of a step; none for a dense model."""
    rows = []
    if "routing/load_max" in record:
        unused = 100 * record["routing/unused"]
        rows.append(
            (
                "expert load",
                f"{record['routing/load_max']:.2f} times the mean at most, {unused:.0f}% unused",
            )
        )
    if "routing/effective_neighbours" in record:
        rows.append(
            (
                "neighbours",
                f"{record['routing/effective_neighbours']:.1f} tokens share in a token's routing",
            )
        )
    return rows


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def _tensorboard() -> str:
    command = Path(sys.executable).parent / "tensorboard"
    return os.path.relpath(command) if command.is_relative_to(Path.cwd()) else "tensorboard"


def _say(line: str) -> None:
    print(f"\n== {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    stop_at_signals()
    sys.exit(guard(main))
