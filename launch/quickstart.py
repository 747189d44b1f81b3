"""`polyad quickstart`: a complete example from data to a score.

data -> two processes train half way, and end -> two new ones continue -> a score, and a table

A quickstart that was interrupted is resumed; a finished one starts over.
"""

import json
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyad.launch.processes import STOPPED, polyad
from polyad.train.errors import stopped
from polyad.train.records import last_loss, median_rate, peak_memory, read_records
from polyad.train.results import aligned

TEXT_CONFIG = Path("configs/quickstart/gpt2-smoe.yaml")
IMAGES_CONFIG = Path("configs/quickstart/vmoe.yaml")
DIGITS = "digits"
LARGER = ("model.image_size=32", "model.patch_size=4", "data.augmentation.flip=true")
"""Keys for images from other sources such as CIFAR, since digits have 8 x 8 pixels."""
VOCAB_SIZE = 8192
PROCESSES = 2
FILES = (
    *("config.yaml", "environment.json", "metrics.jsonl", "report.html", "spikes.jsonl"),
    *("stalls.txt", ".lease", ".lock", ".watch"),
)
FOLDERS = ("checkpoints", "collectives", "launch", "profile", "tensorboard", "wandb")
"""Contents of a run folder; a folder with anything else is not deleted."""

Rows = list[tuple[str, str]]
"""Names and values of the table at the end."""


class StepFailed(Exception):
    """A step of the quickstart failed; its command printed the error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Quickstart(ABC):
    """A quickstart.

    Args:
        config: the run's configuration.
        folder: all output is written inside it.
        overrides: `key=value` for the configuration.
    """

    prepares: str
    """Title: data and model, for display."""
    trains: str
    """The model, for display."""
    compares: str
    """Name of the baseline for the score."""

    def __init__(self, config: Path, folder: Path, overrides: tuple[str, ...] = ()) -> None:
        self.config, self.overrides = config, overrides
        self.data, self.run = folder / "data", folder / "run"
        self.result = folder / "validation.json"

    @abstractmethod
    def prepare_arguments(self) -> list[str]:
        """The arguments of `polyad prepare`."""

    @abstractmethod
    def finish(self, result: dict[str, Any], half: int) -> Rows:
        """Compares the score with the baseline, and describes the result.

        Args:
            result: output of `polyad evaluate`.
            half: the step from which the run was resumed.
        """

    def main(self) -> int:
        """Runs the quickstart.

        Returns:
            The exit status of the first step that failed, 0 if none did.
        """
        started = time.monotonic()
        try:
            rows = self._steps()
        except StepFailed as error:
            return error.status
        rows.append(("time", f"{time.monotonic() - started:.0f} s"))
        print("\n".join(["", *aligned(rows, "<"), "", *self._next_steps()]), flush=True)
        return 0

    def _next_steps(self) -> list[str]:
        """Commands to try next, with descriptions."""
        commands = [(what, f"{_program('polyad')} {words}") for words, what in self.next_commands()]
        return ["Next:", *(f"  {line}" for line in aligned(commands, "<"))]

    @abstractmethod
    def next_commands(self) -> Sequence[tuple[str, str]]:
        """Three command lines without the program, with descriptions."""

    def _steps(self) -> Rows:
        from polyad.train.config.run import load_config

        config = load_config(self.config, self.overrides)
        half = config.checkpoint.every
        begun = step_to_go_on_from(self.run, self.result)
        if not begun:
            remove_previous_run(self.run)
            self.result.unlink(missing_ok=True)
        _say(f"1/5  prepare: {self.prepares}")
        _run_polyad("prepare", *self.prepare_arguments())
        if begun and not self._goes_on():
            remove_previous_run(self.run)
            begun = 0
        _say(
            f"2/5  train {self.trains} with expert parallelism over {PROCESSES} processes and ZeRO "
            f"1, to step {half}"
        )
        processes = ("--processes-per-node", str(PROCESSES))
        launch = ("launch", str(self.config), *processes, *self.overrides)
        if begun < half:
            # The schedule spans the whole run, so that resuming does not change it.
            decay = f"schedule.decay_steps={config.schedule.decay_steps or config.train.steps}"
            _run_polyad(*launch, f"train.steps={half}", decay)
        else:
            print(f"already done: the run is at step {begun:,}", file=sys.stderr)
        _say(
            f"3/5  continue in {PROCESSES} new processes from the sharded checkpoint of step {half}"
        )
        _run_polyad(*launch)
        _say("4/5  evaluate on the validation split")
        _run_polyad("evaluate", str(self.run), "--json", str(self.result))
        _say(f"5/5  {self.compares}")
        return self.finish(json.loads(self.result.read_text(encoding="utf-8")), half)

    def _goes_on(self) -> bool:
        """Whether the existing run has this configuration and data."""
        from polyad.train.config.plan import plan_run

        try:
            plan_run(self.config, self.overrides, PROCESSES)
        except ValueError as error:
            _say(f"the existing run cannot be continued and is removed: {error}")
            return False
        return True

    def _model_rows(self) -> Rows:
        """Rows with the size of the model, and how its loss fell."""
        from polyad.train.config.rules import validate
        from polyad.train.config.run import load_config
        from polyad.train.describe import describe, size_in_words

        records = read_records(self.run)
        config = load_config(self.run / "config.yaml")
        model = describe(config, validate(config, PROCESSES))["model"]
        first, last = records[0]["loss"], last_loss(records)
        return [
            ("model", size_in_words(model["parameters"], model["active_parameters"])),
            ("training loss", f"{first:.3f} at the first step, {last:.3f} over the last 10 steps"),
        ]

    def _run_rows(self, half: int, unit: str) -> Rows:
        """Rows about the run that every quickstart shows."""
        records = read_records(self.run)
        rate = median_rate(records, unit)
        checkpoint = self.run / "checkpoints" / f"step-{half:08d}"
        return [
            *_routing_rows(records[-1]),
            ("speed", f"{rate:,.0f} {unit}s/s in training on {PROCESSES} processes"),
            ("peak memory", f"{peak_memory(records) / 2**30:.2f} GiB per process"),
            ("continued", f"at step {half:,} in new processes, from {checkpoint}"),
            ("run folder", f"{self.run}"),
            ("curves", f"{_program('tensorboard')} --logdir {self.run / 'tensorboard'}"),
        ]


def _program(name: str) -> str:
    """How to call a program of this environment from the current folder."""
    path = Path(sys.executable).parent / name
    is_here = path.is_relative_to(Path.cwd()) and shutil.which(name) != str(path)
    return os.path.relpath(path) if is_here else name


def _routing_rows(record: dict[str, Any]) -> Rows:
    """Rows with the routing statistics of a step; empty for a dense model."""
    rows = []
    if "routing/load_max" in record:
        busiest, unused = record["routing/load_max"], 100 * record["routing/unused"]
        load = f"busiest expert {busiest:.2f} times the mean, {unused:.0f}% of experts unused"
        rows.append(("expert load", load))
    if "routing/effective_neighbours" in record:
        similar = f"about {record['routing/effective_neighbours']:.0f} similar tokens"
        rows.append(("token graph", f"each token's routing averages over {similar}"))
    return rows


class TextQuickstart(Quickstart):
    """Trains a GPT-2 on Python's standard library, compared with a unigram model."""

    prepares = "Python's standard library -> a byte-level BPE -> tokens"
    trains = "a GPT-2"
    compares = "compare with a unigram model on the same tokens"

    def prepare_arguments(self) -> list[str]:
        """See `Quickstart.prepare_arguments`."""
        # The text depends on the version of Python.
        return [
            *("--source", "python-stdlib", "--tokenizer", f"train:{VOCAB_SIZE}"),
            *("--output", str(self.data), "--validation-fraction", "0.02"),
            *("--test-fraction", "0.02", "--overwrite"),
        ]

    def finish(self, result: dict[str, Any], half: int) -> Rows:
        """See `Quickstart.finish`."""
        from polyad.data.text.dataset import PreparedData
        from polyad.train.evaluation.baselines import unigram_perplexity

        prepared = PreparedData.open(self.data)
        splits = prepared.split("train"), prepared.split("validation")
        unigram = unigram_perplexity(*splits, prepared.manifest.tokenizer.vocab_size)
        tokens = f"{result['tokens_scored']:,} held-out tokens"
        return [
            *self._model_rows(),
            ("perplexity", f"{result['perplexity']:.1f} on {tokens}"),
            ("unigram baseline", f"{unigram:.1f} on the same tokens"),
            ("bits per byte", f"{result['bits_per_byte']:.3f}"),
            *self._run_rows(half, "token"),
        ]

    def next_commands(self) -> Sequence[tuple[str, str]]:
        """The page of experts, the experts of every token, and text."""
        return [
            (f"report {self.run}", "a page of what each expert is for, to open in a browser"),
            (
                f"experts trace {self.run} --output {self.run}/experts.parquet",
                "the experts of every token",
            ),
            (f"generate {self.run} --prompt 'def '", "text of the model"),
        ]


class ImageQuickstart(Quickstart):
    """Trains a V-MoE on images, compared with the nearest neighbor among the training images.

    Args:
        config: the run's configuration.
        folder: all output is written inside it.
        source: source of the images, as in `polyad prepare --images`.
    """

    trains = "a V-MoE"
    compares = "compare with a nearest-neighbour classifier, and write the report"

    def __init__(self, config: Path, folder: Path, source: str) -> None:
        super().__init__(config, folder, () if source == DIGITS else LARGER)
        self.source = source
        self.prepares = f"{source} -> an index of its images"
        if source == DIGITS:
            folders = "PNG files in folders of classes"
            self.prepares = f"handwritten digits -> {folders} -> an index of them"

    def prepare_arguments(self) -> list[str]:
        """See `Quickstart.prepare_arguments`."""
        return [
            *("--images", self.source, "--output", str(self.data)),
            *("--held-out", "0.2", "--overwrite"),
        ]

    def finish(self, result: dict[str, Any], half: int) -> Rows:
        """See `Quickstart.finish`."""
        from polyad.data.images.dataset import ImageData
        from polyad.train.evaluation.baselines import nearest_neighbour_accuracy

        _run_polyad("report", str(self.run))
        opened, pixels = ImageData.open(self.data), result["image_size"]
        splits = opened.split("train"), opened.split("validation")
        nearest = nearest_neighbour_accuracy(*splits, pixels)
        of_nearest = f"class of the nearest training image, {pixels} x {pixels} pixels"
        return [
            *self._model_rows(),
            ("accuracy", f"{result['top1']:.4f} on {result['images_scored']:,} held-out images"),
            ("nearest neighbour", f"{nearest:.4f}: {of_nearest}"),
            ("calibration error", f"{result['calibration_error']:.4f}"),
            ("held out", str(result["held_out"])),
            *self._run_rows(half, "image"),
            ("report", f"{self.run / 'report.html'}: images and patches of each expert"),
        ]

    def next_commands(self) -> Sequence[tuple[str, str]]:
        """The page of experts, the classes they serve, and another score."""
        return [
            (
                f"report {self.run} --top 12",
                "a page of the images and patches that each expert gets",
            ),
            (f"experts specialize {self.run}", "which classes each expert serves"),
            (f"evaluate {self.run} --split train", "the accuracy on another split"),
        ]


def _run_polyad(*arguments: str) -> None:
    """Runs a command in a child process, so that commands share only files.

    Raises:
        StepFailed: it failed.
        Stopped: or KeyboardInterrupt: a signal stopped it or this process.
    """
    status = polyad(*arguments)
    if status in STOPPED:
        raise stopped(status - 128, "run the same command again to continue this run")
    if status:
        raise StepFailed(status)


def step_to_go_on_from(run: Path, result: Path) -> int:
    """Returns the step of an interrupted run; 0 if it is finished, or does not exist.

    Args:
        run: its folder.
        result: the output file of the quickstart's second to last step.
    """
    from polyad.parallel.checkpoint.manage import complete_checkpoints

    found = [] if result.exists() else complete_checkpoints(run / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0


def remove_previous_run(folder: Path) -> None:
    """Deletes a run folder, if it contains nothing else.

    Raises:
        ConfigError: it contains something that runs do not write.
    """
    from polyad.train.errors import ConfigError

    if not folder.exists():
        return
    others = sorted({entry.name for entry in folder.iterdir()} - {*FILES, *FOLDERS})
    if others or not (folder / "config.yaml").is_file():
        found = f"holds {others[0]}" if others else "has no config.yaml"
        raise ConfigError(f"{folder}: {found}, so it is not the folder of a run; move it away")
    shutil.rmtree(folder)


def _say(line: str) -> None:
    print(f"\n== {line}", file=sys.stderr, flush=True)


def main(images: str | None = None) -> int:
    """Runs the quickstart for text, or for images.

    Args:
        images: The source of images, as in `polyad prepare --images`; None: text.

    Returns:
        The exit status.
    """
    if images is None:
        return TextQuickstart(TEXT_CONFIG, Path("runs/quickstart")).main()
    return ImageQuickstart(IMAGES_CONFIG, Path("runs/quickstart-images"), images).main()
