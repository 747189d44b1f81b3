"""Cards of experts: their use in held-out text, read in the background while a page is open.

Shapes: S experts of a layer, D width.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polyad.data.text.manifest import SplitName
from polyad.train.errors import ConfigError, one_line
from polyad.train.experts.probing import RoutedLayer, routed_layers
from polyad.train.reading import Evaluated, MomentsReader, read
from polyad.train.report.top_text import Snippet, TopText
from polyad.train.results import json_value
from polyad.train.tasks.samples import TextSamples

TOP = 8
"""Number of contexts per expert, over all tokens, and the same number over words."""
_TURN = 0.005
"""Pause in seconds between two batches, in which others can use the model."""


class _EndedError(Exception):
    """Raised when the page is closed."""


class Cards:
    """The top contexts of every expert of a model, and the mean outputs of experts.

    Args:
        opened: the model's held-out text.
        model: the model, in evaluation mode.
        split: the split to read.
        tokens: approximate number of tokens to read, spread evenly over the split.
        lock: held by whoever uses the model.

    Raises:
        ConfigError: the data is not text.
    """

    def __init__(
        self,
        opened: Evaluated,
        model: nn.Module,
        split: SplitName,
        tokens: int,
        lock: threading.Lock,
    ) -> None:
        task = opened.text("--data")
        task.check_split(split)
        self._model, self._lock, self._batch_size = model, lock, opened.batch_size
        self._layers = [layer for layer in routed_layers(model) if layer.in_block]
        self._samples = TextSamples(task, split, tokens, with_first=False)
        device = str(next(model.parameters()).device)
        self._top = TopText(self._layers, self._samples, TOP, device)
        # Experts with shares cannot be replaced by their mean.
        self._moments = MomentsReader([layer for layer in self._layers if not layer.shares])
        self._share, self._is_done, self._error = 0.0, False, ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def end(self) -> None:
        """Stops reading."""
        self._ended.set()
        self._thread.join()

    def wait(self) -> None:
        """Waits until all is read."""
        self._thread.join()

    def _read(self) -> None:
        try:
            with self._lock:
                read(
                    self._model,
                    self._layers,
                    self._samples,
                    [self._top, self._moments],
                    batch_size=self._batch_size,
                    report=self._give_way,
                )
                self._is_done = True
        except _EndedError:
            pass
        except Exception as error:  # shown on the page, since a thread's traceback would be lost
            self._error = f"{type(error).__name__}: {one_line(error)}"

    def _give_way(self, share: float) -> None:
        """Lets others use the model between two batches, when it has no hooks."""
        self._share = share
        self._lock.release()
        try:
            if self._ended.is_set():
                raise _EndedError
            time.sleep(_TURN)  # without a pause, this thread would retake the lock at once
        finally:
            self._lock.acquire()

    def means(self) -> Mapping[str, Tensor]:
        """The mean outputs [S, D] of the experts of each layer, for interventions.

        Raises:
            ConfigError: the text has not been read completely yet.
        """
        if not self._is_done:
            raise ConfigError(f"how: mean is not possible yet: {self.state()}")
        found = self._moments.moments.result()
        return {name: each.mean_SD for name, each in found.items()}

    def state(self) -> str:
        """The progress of the reading."""
        if self._error:
            return f"the held-out text could not be read: {self._error}"
        if self._is_done:
            return f"{self._top.tokens:,} tokens of held-out text are read"
        return f"held-out text is being read: {self._share:.0%}"

    def card(self, layer: RoutedLayer, column: int) -> dict[str, Any]:
        """Returns the content of an expert's card as JSON values.

        Args:
            layer: a layer of the model, whose lock the caller holds.
            column: the expert's.
        """
        if not self._is_done:
            return {"state": self.state(), "is_reading": not self._error}
        shown = self._top.of_expert(self._model, layer, column, self._batch_size)
        found: dict[str, Any] = json_value(
            {
                "state": self.state(),
                "is_reading": False,
                "load": shown.load,
                "active": shown.active,
                "dominant": shown.dominant,
                "words": [_snippet(each) for each in shown.top if each.top.among_words],
                "every": [_snippet(each) for each in shown.top if each.top.among_all],
            }
        )
        return found


def _snippet(snippet: Snippet) -> dict[str, Any]:
    return {
        "coefficient": snippet.top.coefficient,
        "pieces": [
            {"text": each.text, "coefficient": max(each.coefficients), "is_peak": each.is_peak}
            for each in snippet.shown()
        ],
    }
