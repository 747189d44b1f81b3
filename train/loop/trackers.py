"""Where a run's numbers go beside its own files: TensorBoard, Weights & Biases, Trackio.

All get the same numbers under the same names. None of them can end a run: one that fails is left
out from then on, with a line that says so.
"""

import contextlib
import functools
import hashlib
import importlib.util
import math
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from typing_extensions import override

from polyad.data.files import named
from polyad.train.errors import ConfigError, one_line

TrackerName = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "polyad"
"""The project of a run, unless the environment names one (`WANDB_PROJECT`, `TRACKIO_PROJECT`)."""


class Tracker(ABC):
    """A place for curves.

    Args:
        folder: the run's.
        about: its configuration, as JSON values.
        done_steps: steps that it continues from; what is there of later ones is void.
    """

    @abstractmethod
    def __init__(self, folder: Path, about: Mapping[str, Any], done_steps: int) -> None: ...

    @abstractmethod
    def log(
        self, step: int, numbers: Mapping[str, float], lists: Mapping[str, Sequence[float]]
    ) -> None:
        """Adds what a step says.

        Args:
            step: its number.
            numbers: by name; all are finite.
            lists: one number an expert, by name; all are finite.
        """

    def text(self, step: int, name: str, line: str) -> None:
        """Adds a line of text, where there is a place for it."""
        return

    @abstractmethod
    def close(self) -> None:
        """Hands over what was not yet."""


class TensorBoard(Tracker):
    """Event files in `tensorboard/` of the run's folder."""

    def __init__(self, folder: Path, about: Mapping[str, Any], done_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder / "tensorboard"
        _hide_errors_of_the_disk()
        # TensorBoard drops earlier records of this step and of later ones.
        self._writer = SummaryWriter(folder / "tensorboard", purge_step=done_steps + 1)

    @override
    def log(
        self, step: int, numbers: Mapping[str, float], lists: Mapping[str, Sequence[float]]
    ) -> None:
        with named(self._folder):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
            for name, values in lists.items():
                self._writer.add_histogram(name, np.asarray(values), step)

    @override
    def text(self, step: int, name: str, line: str) -> None:
        with named(self._folder):
            self._writer.add_text(name, line, step)

    @override
    def close(self) -> None:
        with named(self._folder):
            self._writer.close()


@functools.cache
def _hide_errors_of_the_disk() -> None:
    """Hides tracebacks of TensorBoard's writing thread: the next call raises what it met."""
    from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

    usual = threading.excepthook

    def hook(met: threading.ExceptHookArgs) -> None:
        if not (isinstance(met.thread, _AsyncWriterThread) and isinstance(met.exc_value, OSError)):
            usual(met)

    threading.excepthook = hook


class WeightsAndBiases(Tracker):
    """A run of wandb, the same one at every start; without an account's key it stays offline."""

    def __init__(self, folder: Path, about: Mapping[str, Any], done_steps: int) -> None:
        import wandb

        mode: Any = None
        if "WANDB_MODE" not in os.environ and not wandb.api.api_key:
            mode = "offline"
        name = folder.absolute()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name.name,
            id=hashlib.sha256(str(name).encode()).hexdigest()[:16],
            resume="allow",
            dir=folder,
            mode=mode,
            config=dict(about),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Steps that are done again after a return to a checkpoint replace nothing, but stand there
        # with their number.
        self._run.define_metric("*", step_metric="step")
        self._histogram = wandb.Histogram

    @override
    def log(
        self, step: int, numbers: Mapping[str, float], lists: Mapping[str, Sequence[float]]
    ) -> None:
        shown = {name: self._histogram(list(values)) for name, values in lists.items()}
        self._run.log({**numbers, **shown, "step": step})

    @override
    def close(self) -> None:
        self._run.finish()


class Trackio(Tracker):
    """A run of Trackio: on this machine, or where its own settings say."""

    def __init__(self, folder: Path, about: Mapping[str, Any], done_steps: int) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            import trackio

            self._trackio = trackio
            trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=folder.absolute().name,
                config=dict(about),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    @override
    def log(
        self, step: int, numbers: Mapping[str, float], lists: Mapping[str, Sequence[float]]
    ) -> None:
        shown = {name: self._trackio.Histogram(list(values)) for name, values in lists.items()}
        self._trackio.log({**numbers, **shown}, step=step)

    @override
    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """Checks that their packages are there.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.trackers: {name} is not installed: pip install {name}, or leave it out"
            )


class Trackers:
    """All that a run has."""

    def __init__(
        self, names: Sequence[str], folder: Path, about: Mapping[str, Any], done_steps: int
    ) -> None:
        self._open: dict[str, Tracker] = {}
        for name in names:
            with self._kept_going(name):
                self._open[name] = TRACKERS[name](folder, about, done_steps)

    @contextlib.contextmanager
    def _kept_going(self, name: str) -> Any:
        """Leaves a tracker out that fails; a full disk is the run's own trouble."""
        try:
            yield
        except OSError:
            if name == "tensorboard":
                raise
            self._leave_out(name, *sys.exc_info()[1:2])
        except Exception as error:
            self._leave_out(name, error)

    def _leave_out(self, name: str, error: object) -> None:
        self._open.pop(name, None)
        line = (
            f"polyad: warning: log.trackers: {name} failed and is no longer used: {one_line(error)}"
        )
        print(line, file=sys.stderr, flush=True)

    def log(self, record: Mapping[str, Any], *, without: str) -> None:
        """Adds a step's record to each.

        Args:
            record: JSON values by name; what is not a finite number, or a list of such, is left
                out.
            without: the beginning of names that make no curve.
        """
        step, numbers, lists = record["step"], {}, {}
        for name, value in record.items():
            if name == "step" or name.startswith(without):
                continue
            if isinstance(value, list):
                if value and all(map(math.isfinite, value)):
                    lists[name] = value
            elif isinstance(value, int | float) and math.isfinite(value):
                numbers[name] = value
        for name, tracker in list(self._open.items()):
            with self._kept_going(name):
                tracker.log(step, numbers, lists)

    def text(self, step: int, name: str, line: str) -> None:
        """Adds a line of text to those that have a place for it."""
        for tracker_name, tracker in list(self._open.items()):
            with self._kept_going(tracker_name):
                tracker.text(step, name, line)

    def close(self) -> None:
        """Hands over what was not yet."""
        for name, tracker in list(self._open.items()):
            with self._kept_going(name):
                tracker.close()
        self._open = {}
