"""Snapshots of a tiny model that is trained meanwhile, called in worker processes."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch

from polyad.model.build import build_model
from polyad.parallel import comm
from polyad.parallel.checkpoint import copying
from polyad.parallel.checkpoint.commit import Retention, complete_checkpoints
from polyad.parallel.checkpoint.copying import Copying
from polyad.parallel.checkpoint.saver import Saver
from polyad.parallel.checkpoint.writer import SaveError
from polyad.parallel.fragments import fill, fragments, persistent_buffers
from polyad.parallel.source import InitialWeights
from polyad.parallel.zero import Engine
from polyad.train.loop.device import Prefetch
from polyad.train.loop.step import train_step
from polyad.train.tasks.language import TextBatch, text_losses
from tests.helpers.saving import change, saving
from tests.helpers.training import Case, build_engine, local_batches, model_yaml


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
    take_step(engine, world, case, 0)
    root = Path(folder)
    with saving(engine, root / "synchronous", None, way="synchronous") as save:
        save(1)
    saver = Saver(engine, root / "process", keep=Retention(), asynchronous=True)
    deaf = mock.patch.object(engine, "before_change") if not waits else nullcontext()
    with copies_held(), deaf:
        saver.save(1, {"step": 1}, model_yaml(Case()), {})
        for _, buffer in persistent_buffers(engine.module):
            buffer.add_(1)  # as a forward pass may: nobody is asked before that
        saver.poll()
        if then == "step":
            take_step(engine, world, case, 1)
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
        take_step(engine, world, case, step)
    after = _content(engine)
    assert not any(torch.equal(value, after[key]) for key, value in before.items())
    return told


def _content(engine: Engine) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (name, field): fragment.view(field).clone()
        for name, fragment in fragments(engine).items()
        for field in ("master", *engine.state_fields)
    }


def take_step(engine: Engine, world: comm.World, case: Case, step: int) -> None:
    """A real one, which has to be applied."""
    batches = local_batches(step, world, case.model)
    ahead = Prefetch(map(TextBatch.of, batches), world.device)
    outcome = train_step(engine, text_losses, ahead, len(batches), case.learning_rate)
    assert outcome.result.applied


@contextmanager
def copies_held() -> Iterator[None]:
    """No thread copies a tensor before somebody waits for the copies."""
    begun, copy_tensor, wait = threading.Event(), copying.copy_tensor, Copying.wait

    def held(place: torch.Tensor, values: torch.Tensor) -> None:
        begun.wait()
        copy_tensor(place, values)

    def told(self: Copying) -> None:
        begun.set()
        wait(self)

    with mock.patch.object(copying, "copy_tensor", held), mock.patch.object(Copying, "wait", told):
        yield


def second_save_waits(case: Case, folder: str) -> list[str]:
    """What is there before and after a second save, whose first one was held up for a while."""
    engine, world = build_engine(case)
    path = Path(folder)
    saver = Saver(engine, path, keep=Retention(), asynchronous=True)
    assert saver.writer_id is not None
    if world.is_main:
        os.kill(saver.writer_id, signal.SIGSTOP)
    saver.save(1, {"step": 1}, model_yaml(case), {})
    for _ in range(3):
        saver.poll()
    comm.barrier()
    before = [path.name for path in complete_checkpoints(path)]
    comm.barrier()
    started = time.monotonic()
    if world.is_main:
        threading.Timer(1.0, os.kill, (saver.writer_id, signal.SIGCONT)).start()
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
    """How a run hears of a failure on rank 1: in a step, and at the next save.

    Args:
        case: what is saved.
        folder: for checkpoints.
        what: fails: the `writer`, which is killed, or a `copy` in the thread.
    """
    engine, world = build_engine(case)
    lines = []
    for in_a_step in (True, False):
        saver = Saver(engine, Path(folder), keep=Retention(), asynchronous=True)
        assert saver.writer_id is not None
        failing = nullcontext()
        if world.rank == 1 and what == "copy":
            error = RuntimeError("the device is lost\nand a line for its makers")
            failing = mock.patch.object(copying, "copy_tensor", side_effect=error)
        elif world.rank == 1:
            os.kill(saver.writer_id, signal.SIGKILL)
            os.waitid(os.P_PID, saver.writer_id, os.WEXITED | os.WNOWAIT)
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
    assert not [t for t in threading.enumerate() if t.name == copying.THREAD_NAME]
    change(engine, 7)
    saver.finish()  # nothing is pending
    comm.barrier()
    return [path.name for path in Path(folder).glob("*")]


def slow_copies(folder: Path, rank: int) -> None:
    """Has every copy in a thread take about 50 ms, with a file `copying-RANK` there meanwhile.

    For the process of a run, of two blocks or so.
    """
    run, copy_tensor = Copying._run, copying.copy_tensor

    def marked(self: Copying) -> None:
        mark = folder / f"copying-{rank}"
        mark.touch()
        try:
            run(self)
        finally:
            mark.unlink(missing_ok=True)

    def slow(place: torch.Tensor, values: torch.Tensor) -> None:
        time.sleep(0.001)
        copy_tensor(place, values)

    Copying._run = marked  # type: ignore[method-assign]
    copying.copy_tensor = slow
