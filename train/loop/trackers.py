"""Trackers of a run's metrics: TensorBoard, Weights & Biases, Trackio.

All get the same numbers under the same names. A tracker cannot end a run: one that fails is dropped
with a message.
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
"""The default project, unless the environment sets `WANDB_PROJECT` or `TRACKIO_PROJECT`."""


class Tracker(ABC):
    """A tracker of metrics.

    Args:
        folder: the run's folder.
        about: its configuration, as JSON values.
        done_steps: the step that the run continues from; later entries are void.
    """

    @abstractmethod
    def __init__(self, folder: Path, about: Mapping[str, Any], done_steps: int) -> None: ...

    @abstractmethod
    def log(
        self, step: int, numbers: Mapping[str, float], lists: Mapping[str, Sequence[float]]
    ) -> None:
        """Adds the numbers of a step.

        Args:
            step: its number.
            numbers: by name; all are finite.
            lists: one number per expert, by name; all are finite.
        """

    @abstractmethod
    def close(self) -> None:
        """Sends what is still buffered, and closes."""


class TensorBoard(Tracker):
    """Event files in the run's folder `tensorboard/`."""

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
    def close(self) -> None:
        with named(self._folder):
            self._writer.close()


@functools.cache
def _hide_errors_of_the_disk() -> None:
    """Hides tracebacks of TensorBoard's writer thread; the next call raises its error."""
    from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

    usual = threading.excepthook

    def hook(met: threading.ExceptHookArgs) -> None:
        if not (isinstance(met.thread, _AsyncWriterThread) and isinstance(met.exc_value, OSError)):
            usual(met)

    threading.excepthook = hook


class WeightsAndBiases(Tracker):
    """A wandb run, the same at every restart; offline without an API key."""

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
        # Steps that a restart repeats do not replace earlier ones: both have their number.
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
    """A Trackio run, on this machine or where Trackio's own settings say."""

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
    """Checks that the trackers' packages are installed.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.trackers: {name} is not installed: pip install {name}, or leave it out"
            )


class Trackers:
    """All trackers of a run."""

    def __init__(
        self, names: Sequence[str], folder: Path, about: Mapping[str, Any], done_steps: int
    ) -> None:
        self._open: dict[str, Tracker] = {}
        for name in names:
            with self._kept_going(name):
                self._open[name] = TRACKERS[name](folder, about, done_steps)

    @contextlib.contextmanager
    def _kept_going(self, name: str) -> Any:
        """Drops a tracker that fails, except for a full disk, which concerns the whole run."""
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

    def log(self, record: Mapping[str, Any]) -> None:
        """Adds a step's record to each.

        Args:
            record: JSON values by name; values other than finite numbers and lists of them are left
                out.
        """
        step, numbers, lists = record["step"], {}, {}
        for name, value in record.items():
            if name == "step":
                continue
            if isinstance(value, list):
                if value and all(map(math.isfinite, value)):
                    lists[name] = value
            elif isinstance(value, int | float) and math.isfinite(value):
                numbers[name] = value
        for name, tracker in list(self._open.items()):
            with self._kept_going(name):
                tracker.log(step, numbers, lists)

    def close(self) -> None:
        """Sends what is still buffered, and closes."""
        for name, tracker in list(self._open.items()):
            with self._kept_going(name):
                tracker.close()
        self._open = {}
