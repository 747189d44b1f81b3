"""What the loop calls between training steps. All processes call each hook together."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyad.parallel.checkpoint.saving import Saver
from polyad.parallel.zero import Engine
from polyad.train.guard.memory import RunMemory
from polyad.train.guard.stopping import StopSignals
from polyad.train.guard.stragglers import Stragglers
from polyad.train.guard.watchdog import Watchdog
from polyad.train.state import TrainState
from polyad.train.tasks.task import Task


class Validation:
    """Scores held-out data between steps.

    Args:
        task: has held-out data.
        engine: of the run.
        batch_size: samples in a forward pass.
        memory: explains an error where memory runs out.
        stop: a signal interrupts validation.
        watchdog: is told the progress.
    """

    def __init__(
        self,
        task: Task[Any],
        engine: Engine,
        batch_size: int,
        memory: RunMemory,
        stop: StopSignals,
        watchdog: Watchdog,
    ) -> None:
        self._task, self._engine, self._batch_size = task, engine, batch_size
        self._memory, self._stop, self._watchdog = memory, stop, watchdog

    def __call__(self) -> dict[str, float]:
        """Returns the scores to add to the step's record.

        Raises:
            StopAsked: a signal came during validation.
        """
        self._engine.train(False)
        with self._memory.validating("in validation"):
            return self._task.validate(
                self._engine,
                batch_size=self._batch_size,
                world=self._engine.world,
                report=self._report,
            )

    def _report(self, share: float) -> None:
        self._watchdog.at(f"validation, {share:.0%} done")
        self._stop.check()


class Checkpoints:
    """Writes the run's checkpoints.

    Args:
        saver: writes them.
        config_yaml: the resolved configuration.
        files: of the task, by name.
        task: says what is counted.
        memory: explains where it runs out.
        keep_best: whether that of the best validation stays.
    """

    def __init__(
        self,
        saver: Saver,
        config_yaml: str,
        files: Mapping[str, bytes],
        task: Task[Any],
        memory: RunMemory,
        keep_best: bool = False,
    ) -> None:
        self._saver, self._config_yaml, self._files = saver, config_yaml, files
        self._task, self._memory, self._keep_best = task, memory, keep_best
        self.poll, self.finish = saver.poll, saver.finish

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint, or begins to: `poll` checks its progress, `finish` waits for it."""
        with self._memory.building(f"saving step {state.step}"):
            counted = self._task.counted(state.samples)
            values = state.to_json() | counted
            best = state.best_step or None if self._keep_best else None
            judged = state.unfinished is None
            self._saver.save(
                state.step, values, self._config_yaml, self._files, best, judged=judged
            )


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop calls between steps."""

    validate: Callable[[], dict[str, float]] | None
    """None where the data has no validation split."""
    checkpoints: Checkpoints
    go_back: Callable[[TrainState, int], Iterator[Any] | None]
    """Takes the state and a global batch, and goes back to the newest checkpoint; see `Rewind`."""
    sources: Callable[[int], dict[str, list[int]]]
    """The documents of a global batch, by the name of their data. Only the main process calls this
    hook."""
    stop: StopSignals
    at: Callable[[str], None]
    """Tells the watchdog what the process does next, which counts as progress."""
    stragglers: Stragglers
    fluctuation: Callable[[], dict[str, float]] | None = None
    """Compares routing with that at the last checkpoint; called before a checkpoint is written.
    None where `log.fluctuation` does not ask for it."""


def sources_of(task: Task[Any], global_batch_size: int) -> Callable[[int], dict[str, list[int]]]:
    """Returns a function from the number of a global batch to the documents of its samples."""

    def sources(batch: int) -> dict[str, list[int]]:
        first = batch * global_batch_size
        return task.sources(range(first, first + global_batch_size))

    return sources
