"""Saves of a tiny model with its disk recorded or failing, called in worker processes."""

import mmap
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from model.build import build_model
from parallel import comm, copying, snapshot, snapshot_process
from parallel.checkpoint_writer import SaveError
from parallel.commit import Retention, complete_checkpoints
from parallel.copying import Copying
from parallel.fragments import fill, fragments, persistent_buffers
from parallel.manifest import CheckpointError, Manifest
from parallel.parallelize import InitialWeights
from parallel.saver import Saver
from parallel.verification import newest_that_opens, newest_verified
from parallel.zero import Engine
from tests.helpers.disk import audited, read_tree, recorded
from tests.helpers.training import Case, build_engine, local_batches, model_yaml
from train.device import Prefetch
from train.step import train_step

Save = Callable[[int], None]


@contextmanager
def saving(engine: Engine, folder: Path, last: int | None, *, way: str) -> Iterator[Save]:
    """Gives what saves a step and returns once it is done, in this way.

    `snapshot` is as `process`, but the orders are done by a thread of this process, where they can
    be recorded and failed.
    """
    thread = mock.patch.object(snapshot, "_start", _Thread) if way == "snapshot" else nullcontext()
    with thread:
        keep = Retention(last=last)
        saver = Saver(engine, folder, keep=keep, asynchronous=way != "synchronous")

        def save(step: int) -> None:
            saver.save(step, {"step": step}, model_yaml(Case()), None)
            saver.finish()

        try:
            yield save
        finally:
            saver.close()


class _Thread:
    """A writing process that is a thread; the part of `Popen` that is used."""

    def __init__(self, descriptor: int) -> None:
        (orders, stdin), (stdout, answers) = os.pipe(), os.pipe()
        self.stdin, self.stdout, self.pid = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), 0
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        arguments = (os.fdopen(orders), os.fdopen(answers, "w"), memory)
        self._thread = threading.Thread(target=snapshot_process.serve, args=arguments)
        self._thread.start()

    def kill(self) -> None:
        """Nothing is left running: it ends with its orders."""

    def wait(self) -> int:
        self._thread.join()
        return 0


def change(engine: Engine, step: int) -> None:
    """Makes the next checkpoint another one in every tensor."""
    engine.about_to_change()
    for fragment in fragments(engine).values():
        for field in ("master", *engine.state_fields):
            fragment.view(field).fill_(step)


def record_saves(case: Case, folder: str, steps: list[int], last: int, way: str) -> dict[str, Any]:
    """Saves several times; gives all operations, where each save ended, and what it left.

    The folder's parent is there and empty.
    """
    engine, _ = build_engine(case)
    path = Path(folder)
    ends, trees = [], []
    with (
        recorded() as recorder,
        audited(path.parent) as seen,
        saving(engine, path, last, way=way) as save,
    ):
        for step in steps:
            change(engine, step)
            save(step)
            comm.barrier()
            ends.append(time.monotonic_ns())
            trees.append(read_tree(path))
            comm.barrier()
    return {"operations": recorder.operations, "ends": ends, "trees": trees, "audited": seen}


def failing_save(
    case: Case, folder: str, faults: list[tuple[int, int, int]], way: str
) -> list[Any]:
    """For each (rank, operation, errno) a save that meets it.

    Every save is of step 2 and begins with a good checkpoint of step 1.

    Returns:
        For each the error ("none" if none), the operation that failed, whether step 1 is still
        what it was, and what became of step 2: "absent", "whole" or "broken".
    """
    engine, _ = build_engine(case)
    path, results = Path(folder), []
    change(engine, 1)
    with saving(engine, path, None, way=way) as save:
        save(1)
    change(engine, 2)
    before = read_tree(path)
    for rank, number, error in faults:
        comm.barrier()
        with (
            recorded(number if comm.rank() == rank else None, error) as recorder,
            saving(engine, path, 2, way=way) as save,
        ):
            try:
                save(2)
                text = "none"
            except SaveError as caught:
                text = str(caught)
        comm.barrier()
        after = read_tree(path)
        old = all(after.get(name, 0) == before[name] for name in before if name != "latest")
        results.append((text, recorder.failed, old, _state_of(path / "step-00000002")))
        comm.barrier()
        if comm.rank() == 0:
            _only_step_1(path)
    return results


def _state_of(path: Path) -> str:
    if not path.exists():
        return "absent"
    try:
        Manifest(path).verify()
    except CheckpointError:
        return "broken"
    return "whole"


def _only_step_1(path: Path) -> None:
    for inner in path.iterdir():
        if inner.name not in ("step-00000001", "latest"):
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
    (path / "latest").write_text("step-00000001\n")


def save_in_little_room(case: Case, folder: str, size: int, way: str) -> tuple[str, dict[str, Any]]:
    """A save in which the kernel itself refuses rank 0 files of more than `size` bytes."""
    engine, world = build_engine(case)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with saving(engine, Path(folder), None, way=way) as save:
        save(1)
        writers = [child.pid for child in psutil.Process().children()]
        limited = [0, *writers] if world.is_main else []
        try:
            for process in limited:
                resource.prlimit(process, resource.RLIMIT_FSIZE, (size, before[1]))
            save(2)
            text = "none"
        except SaveError as error:
            text = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    comm.barrier()
    return text, read_tree(Path(folder))


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
        saver.save(1, {"step": 1}, model_yaml(Case()), None)
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


def take_step(engine: Engine, world: comm.World, case: Case, step: int) -> None:
    """A real one, which has to be applied."""
    batches = local_batches(step, world, case.model)
    ahead = Prefetch(iter(batches), world.device)
    outcome = train_step(engine, ahead, len(batches), case.learning_rate)
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
    saver.save(1, {"step": 1}, model_yaml(case), None)
    for _ in range(3):
        saver.poll()
    comm.barrier()
    before = [path.name for path in complete_checkpoints(path)]
    comm.barrier()
    started = time.monotonic()
    if world.is_main:
        threading.Timer(1.0, os.kill, (saver.writer_id, signal.SIGCONT)).start()
    saver.save(2, {"step": 2}, model_yaml(case), None)
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
                saver.save(1, {}, model_yaml(case), None)
                engine.about_to_change()  # waits, and tells nobody
            if in_a_step:
                for _ in range(200):
                    saver.poll()
                    time.sleep(0.01)
            else:
                saver.save(2, {}, model_yaml(case), None)
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
        saver.save(1, {}, model_yaml(case), None)
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


def bench_saves(folder: str, model: Any) -> tuple[dict[str, Any], str]:
    """`polyad bench checkpoint` of a tiny model."""
    from launch.bench.checkpoint import bench_checkpoint, checkpoint_bench_table

    result = bench_checkpoint(
        Path(folder), repeats=2, steps=1, rest=0.0, sequence_length=model.sequence_length,
        model=model,
    )  # fmt: skip
    return result, checkpoint_bench_table(result)


def verify_shares(folder: str) -> tuple[str, list[tuple[str, int]]]:
    """What a run would go on from (or its error), and the blocks that this process verified of
    the first that was tried.
    """
    comm.initialize()
    seen: list[list[tuple[str, int]]] = []
    original = Manifest.verify

    def verify(self: Manifest, blocks: Any = None, report: Any = lambda done: None) -> None:
        listed = list(self.blocks() if blocks is None else blocks)
        seen.append([(block.name, block.begin) for block in listed])
        original(self, listed, report)

    newest = newest_that_opens(Path(folder))
    with mock.patch.object(Manifest, "verify", verify):
        try:
            chosen = newest_verified(newest, Path(folder))
        except CheckpointError as error:
            return f"{error.exit_status}: {error}", seen[0]
    return chosen.folder.name if chosen else "none", seen[0]
