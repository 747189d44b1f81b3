"""Back to the newest checkpoint in the middle of a run, and on without a batch."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from torch import Tensor

from parallel import comm
from parallel.checkpoint.checkpoint import Checkpoint
from parallel.checkpoint.saver import Saver
from parallel.checkpoint.verification import newest_that_opens, newest_verified
from parallel.fragments import fill
from parallel.zero import Engine
from train.config.plan import Plan
from train.guard.spikes import batches_left_out
from train.state import TrainState


def start_state(plan: Plan, checkpoint: Checkpoint | None) -> TrainState:
    """Where a run stands that goes on from a checkpoint, or begins.

    Args:
        plan: the run's.
        checkpoint: None at the beginning.
    """
    state = TrainState.from_json(checkpoint.state.model_dump()) if checkpoint else TrainState()
    tokenizer = plan.data.tokenizer
    state.data_fingerprint = plan.data.fingerprint
    state.tokenizer_fingerprint = tokenizer.fingerprint
    state.end_of_text = tokenizer.end_of_text
    state.vocab_size = tokenizer.vocab_size
    state.world_size = plan.dims.world_size
    return state


def add_batches_left_out(state: TrainState, folder: Path, world: comm.World) -> None:
    """Adds what the run went back without after its newest checkpoint. All processes call it.

    Args:
        state: brought up to date.
        folder: the run's.
        world: this process.
    """
    later = comm.from_main(batches_left_out(folder) if world.is_main else None)
    state.left_out = sorted({*state.left_out, *later})


def restore_random_numbers(
    seed: int, state: TrainState, checkpoint: Checkpoint | None, world: comm.World
) -> None:
    """Dropout goes on where it was, or starts from (seed, step, rank) where nothing was saved."""
    comm.seed_random(seed, state.step, world)
    if checkpoint is not None:
        checkpoint.restore_random_states(world.device)


class Rewind:
    """The loop's `go_back`.

    Args:
        engine: whose weights and optimizer state go back.
        saver: of the run's checkpoints, one of which may still be written.
        plan: the run's.
        world: this process.
        batches: gives the micro-batches that follow a state.
    """

    def __init__(
        self,
        engine: Engine,
        saver: Saver,
        plan: Plan,
        world: comm.World,
        batches: Callable[[TrainState], Iterator[Tensor]],
    ) -> None:
        self._engine, self._saver, self._plan = engine, saver, plan
        self._world, self._batches = world, batches

    def __call__(self, state: TrainState, batch: int) -> Iterator[Tensor] | None:
        """Takes everything back, the state in place.

        Args:
            state: of the run; afterwards that of the checkpoint, but for the batches left out.
            batch: the global batch that is left out.
        """
        self._saver.finish()
        folder = Path(self._plan.config.run.folder) / "checkpoints"
        checkpoint = newest_verified(newest_that_opens(folder), folder)
        if checkpoint is None:
            return None
        left_out = sorted({*state.left_out, batch})
        fill(self._engine, checkpoint)
        then = start_state(self._plan, checkpoint)
        for each in fields(TrainState):
            setattr(state, each.name, getattr(then, each.name))
        state.left_out = left_out
        restore_random_numbers(self._plan.config.seed, state, checkpoint, self._world)
        return self._batches(state)
