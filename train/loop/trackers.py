"""Trackers of a run's metrics: TensorBoard, Weights & Biases, Trackio.

All get the same numbers under the same names. A tracker cannot end a run: one that fails is dropped
with a message.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from polyad.data.files import named
from polyad.train.errors import ConfigError, one_line

TrackerName = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "polyad"
"""The default project, unless the environment sets `WANDB_PROJECT` or `TRACKIO_PROJECT`."""


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

    def log(
        self, step: int, numbers: Mapping[str, float], lists: Mapping[str, Sequence[float]]
    ) -> None:
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

    def log(
        self, step: int, numbers: Mapping[str, float], lists: Mapping[str, Sequence[float]]
    ) -> None:
        """Adds the numbers of a step and histograms of lists. Weights & Biases leaves out a step
        that a restart repeats."""
        histograms = {name: self._library.Histogram(list(values)) for name, values in lists.items()}
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


class Trackers:
    """All trackers of a run."""

    def __init__(
        self, names: Sequence[str], folder: Path, about: Mapping[str, Any], done_steps: int
    ) -> None:
        self._open: dict[str, TensorBoard | Experiment] = {}
        for name in names:
            with self._kept_going(name):
                if name == "tensorboard":
                    self._open[name] = TensorBoard(folder, done_steps)
                else:
                    self._open[name] = Experiment(name, folder, about)

    @contextlib.contextmanager
    def _kept_going(self, name: str) -> Iterator[None]:
        """Drops a tracker that fails, except for a full disk, which concerns the whole run."""
        try:
            yield
        except Exception as error:
            if name == "tensorboard" and isinstance(error, OSError):
                raise
            self._open.pop(name, None)
            line = f"log.trackers: {name} failed and is no longer used: {one_line(error)}"
            print(f"polyad: warning: {line}", file=sys.stderr, flush=True)

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
