"""Snapshots of a tiny model during training; called in worker processes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from polyad.model.build import build_model
from polyad.parallel import comm
from polyad.parallel.checkpoint import save as save_file
from polyad.parallel.checkpoint.manage import Retention, complete_checkpoints
from polyad.parallel.checkpoint.save import SaveError, Saver, Task
from polyad.parallel.fragments import fill, persistent_buffers
from polyad.parallel.source import InitialWeights
from polyad.parallel.zero import Engine, fragments
from tests.helpers.saving import change, saving
from tests.helpers.training import Case, build_engine, model_yaml, take_step


def save_both_ways(case: Case, folder: str, then: str = "step", waits: bool = True) -> bool:
    """A synchronous checkpoint, and an asynchronous one of the same moment.

    No weight of the latter is copied before somebody waits for it, and until it is finished the
    run goes on: with a step, with initial values, or without a change until `finish`.

    Args:
        case: what is trained, for a step before.
        folder: for a folder of each.
        then: `step`, `fill` or `finish`.
        waits: whether what changes weights waits; without, the checkpoint has to be another one.

    Returns:
        Whether the run had to wait before it could change weights.
    """
    engine, world = build_engine(case)
    assert take_step(engine, world, case, 0).result.applied
    root = Path(folder)
    with saving(engine, root / "synchronous", None, way="synchronous") as save:
        save(1)
    saver = Saver(engine, root / "snapshot", keep=Retention(), asynchronous=True)
    deaf = mock.patch.object(engine, "before_change") if not waits else nullcontext()
    with copies_held(), deaf:
        saver.save(1, {"step": 1}, model_yaml(Case()), {})
        for _, buffer in persistent_buffers(engine.module):
            buffer.add_(1)  # as a forward pass may: nobody is asked before that
        saver.poll()
        if then == "step":
            assert take_step(engine, world, case, 1).result.applied
        elif then == "fill":
            fill(engine, InitialWeights(build_model(case.model), 8))
        waited = saver.seconds_waited > 0
        saver.finish()
    saver.close()
    return waited


def changes_told(case: Case) -> list[bool]:
    """Asks once, though twice, to be told of a change, and takes two steps.

    Returns:
        Each time that it was told: whether everything still was as before.
    """
    engine, world = build_engine(case)
    before, told = _content(engine), []

    def note() -> None:
        now = _content(engine)
        told.append(all(torch.equal(value, now[key]) for key, value in before.items()))

    for _ in range(2):
        engine.before_change(note)
    for step in range(2):
        assert take_step(engine, world, case, step).result.applied
    after = _content(engine)
    assert not any(torch.equal(value, after[key]) for key, value in before.items())
    return told


def _content(engine: Engine) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (name, field): values.clone()
        for name, fragment in fragments(engine).items()
        for field, values in fragment.values.items()
    }


@contextmanager
def copies_held() -> Iterator[None]:
    """No thread copies a tensor before somebody waits for the copies."""
    begun, copy_tensor = threading.Event(), save_file.copy_tensor
    wait, join = Task.wait_for_copies, Task.join

    def held(place: torch.Tensor, values: torch.Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.wait()
        copy_tensor(place, values)

    def told(self: Task) -> None:
        begun.set()
        wait(self)

    def joined(self: Task) -> None:
        begun.set()
        join(self)

    with (
        mock.patch.object(save_file, "copy_tensor", held),
        mock.patch.object(Task, "wait_for_copies", told),
        mock.patch.object(Task, "join", joined),
    ):
        yield


def second_save_waits(case: Case, folder: str) -> list[str]:
    """Checkpoints before and after a second save, while the first one is delayed."""
    engine, world = build_engine(case)
    path = Path(folder)
    saver = Saver(engine, path, keep=Retention(), asynchronous=True)
    going, write_shard = threading.Event(), save_file.write_shard

    def held_up(*given: Any, **named: Any) -> Any:
        going.wait()
        return write_shard(*given, **named)

    if not world.is_main:
        going.set()
    with mock.patch.object(save_file, "write_shard", held_up):
        saver.save(1, {"step": 1}, model_yaml(case), {})
        for _ in range(3):
            saver.poll()
        comm.barrier()
        before = [path.name for path in complete_checkpoints(path)]
        comm.barrier()
        started = time.monotonic()
        threading.Timer(1.0, going.set).start()
        saver.save(2, {"step": 2}, model_yaml(case), {})
        comm.barrier()
    waited = time.monotonic() - started
    # The second one may be done as well by now.
    between = [path.name for path in complete_checkpoints(path)][:1]
    saver.finish()
    after = [path.name for path in complete_checkpoints(path)]
    saver.close()
    return [str(waited > 0.9), *before, "|", *between, "|", *after]


def save_that_fails(case: Case, folder: str, what: str) -> tuple[str, str]:
    """How a run learns of a failure on rank 1: in a step, and at the next save.

    Args:
        case: what is saved.
        folder: for checkpoints.
        what: fails in the thread: `copy_tensor` or `write_tensors`.
    """
    engine, world = build_engine(case)
    lines = []
    for in_a_step in (True, False):
        saver = Saver(engine, Path(folder), keep=Retention(), asynchronous=True)
        failing = nullcontext()
        if world.rank == 1:
            error = RuntimeError("the device is lost\nand a line for its makers")
            failing = mock.patch.object(Task, "run", failing_run(what, error))
        comm.barrier()
        try:
            with failing:
                saver.save(1, {}, model_yaml(case), {})
                engine.about_to_change()  # waits, and tells nobody
            if in_a_step:
                for _ in range(200):
                    saver.poll()
                    time.sleep(0.01)
            else:
                saver.save(2, {}, model_yaml(case), {})
            lines.append("none")
        except SaveError as error:
            lines.append(str(error))
        saver.close()
        comm.barrier()
    return lines[0], lines[1]


def failing_run(what: str, error: Exception) -> Callable[[Task], None]:
    """The work of a thread in which one function fails."""
    run = Task.run

    def failing(self: Task) -> None:
        with mock.patch.object(save_file, what, side_effect=error):
            run(self)

    return failing


def close_while_writing(case: Case, folder: str) -> tuple[float, list[str]]:
    """What a run leaves that ends in the middle of a file, whose every piece takes 10 ms.

    Returns:
        Seconds that closing took, and names in the checkpoints' folder.
    """
    engine, _ = build_engine(case)
    saver = Saver(engine, Path(folder), keep=Retention(), asynchronous=True)
    written, all_finite = threading.Event(), save_file.all_finite

    def slow(piece: memoryview) -> bool:
        written.set()
        time.sleep(0.01)
        return all_finite(piece)

    with mock.patch.object(save_file, "all_finite", slow):
        saver.save(1, {}, model_yaml(case), {})
        assert written.wait(10)
        started = time.monotonic()
        saver.close()
        seconds = time.monotonic() - started
    assert not [t for t in threading.enumerate() if t.name == save_file.THREAD_NAME]
    comm.barrier()
    return seconds, [path.name for path in Path(folder).glob("step-*")]


def close_while_copying(case: Case, folder: str) -> list[str]:
    """What a run that ends in the middle of a copy leaves: nothing is committed or read any more.

    Returns:
        Names in the checkpoints' folder.
    """
    engine, _ = build_engine(case)
    saver = Saver(engine, Path(folder), keep=Retention(), asynchronous=True)
    with copies_held():
        saver.save(1, {}, model_yaml(case), {})
        saver.close()
    assert not [t for t in threading.enumerate() if t.name == save_file.THREAD_NAME]
    change(engine, 7)
    saver.finish()  # nothing is pending
    comm.barrier()
    return [path.name for path in Path(folder).glob("*")]
