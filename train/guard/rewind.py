"""Back to the newest checkpoint in the middle of a run, and on without a batch."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from polyad.parallel import comm
from polyad.parallel.checkpoint.finding import newest_that_opens, newest_verified
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.checkpoint.saving import Saver
from polyad.parallel.fragments import fill
from polyad.parallel.zero import Engine
from polyad.train.guard.spikes import batches_left_out
from polyad.train.state import TrainState


def add_batches_left_out(state: TrainState, folder: Path, world: comm.World) -> None:
    """Adds the batches left out since the newest checkpoint was written. All processes call it.

    Args:
        state: its `left_out` is updated.
        folder: the run's.
        world: this process.
    """
    later = comm.from_main(batches_left_out(folder, state.step) if world.is_main else None)
    state.left_out = sorted({*state.left_out, *later})


def restore_random_numbers(
    seed: int, state: TrainState, checkpoint: Checkpoint | None, world: comm.World
) -> None:
    """Restores dropout's generators; without those of this layout seeds them by seed and step."""
    comm.seed_random(seed, state.step, world)
    if checkpoint is not None:
        checkpoint.restore_random_states(world)


class Rewind:
    """Back to the newest checkpoint, and on without a batch.

    Args:
        engine: whose weights and optimizer state go back.
        saver: of the run's checkpoints, one of which may still be written.
        checkpoints: the folder of them.
        seed: the run's.
        start: gives the state of a run that goes on from a checkpoint.
        batches: gives the micro-batches that follow a state.
    """

    def __init__(
        self,
        engine: Engine,
        saver: Saver,
        checkpoints: Path,
        seed: int,
        start: Callable[[Checkpoint], TrainState],
        batches: Callable[[TrainState], Iterator[Any]],
    ) -> None:
        self._engine, self._saver, self._checkpoints = engine, saver, checkpoints
        self._seed, self._start, self._batches = seed, start, batches

    def __call__(self, state: TrainState, batch: int) -> Iterator[Any] | None:
        """Goes back to the newest checkpoint; the state is changed in place.

        Args:
            state: of the run; afterwards that of the checkpoint, but for the batches left out.
            batch: the global batch that is left out.

        Returns:
            The micro-batches that follow; None where there is no checkpoint, and then nothing is
            changed.
        """
        self._saver.finish()
        is_main = self._engine.world.is_main
        newest = newest_that_opens(self._checkpoints) if is_main else None
        checkpoint = newest_verified(newest, self._checkpoints)
        if checkpoint is None:
            return None
        left_out = sorted({*state.left_out, batch})
        fill(self._engine, checkpoint, frozen=False)
        earlier = self._start(checkpoint)
        for each in fields(TrainState):
            setattr(state, each.name, getattr(earlier, each.name))
        state.left_out, state.unfinished = left_out, None
        restore_random_numbers(self._seed, state, checkpoint, self._engine.world)
        return self._batches(state)
