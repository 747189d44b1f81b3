"""Saves of a tiny model with its disk recorded or failing, called in worker processes."""

import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from polyad.parallel import comm
from polyad.parallel.checkpoint.format import CheckpointError, Contents, verify_contents
from polyad.parallel.checkpoint.load import newest_that_opens, newest_verified
from polyad.parallel.checkpoint.manage import Retention
from polyad.parallel.checkpoint.save import SaveError, Saver, save_weights
from polyad.parallel.zero import Engine, fragments
from tests.helpers.disk import audited, read_tree, recorded
from tests.helpers.training import Case, build_engine, model_yaml

Save = Callable[[int], None]


@contextmanager
def saving(engine: Engine, folder: Path, last: int | None, *, way: str) -> Iterator[Save]:
    """Gives what saves a step, `synchronous` or by a `snapshot`, and returns once it is done."""
    keep = Retention(last=last)
    saver = Saver(engine, folder, keep=keep, asynchronous=way == "snapshot")

    def save(step: int) -> None:
        saver.save(step, {"step": step}, model_yaml(Case()), {})
        saver.finish()

    try:
        yield save
    finally:
        saver.close()


def save_tensors(
    path: Path, tensors: dict[str, Tensor], config_yaml: str = "", **state: Any
) -> Path:
    """Writes a checkpoint of one process that has these weights, and nothing beside them."""
    path.mkdir(parents=True)
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    beside = {"files": {}, "buffers": {}, "state": state, "config_yaml": config_yaml}
    save_weights(path, shapes, tensors.__getitem__, **beside)
    return path


def change(engine: Engine, step: int) -> None:
    """Makes the next checkpoint another one in every tensor."""
    engine.about_to_change()
    for fragment in fragments(engine).values():
        for values in fragment.values.values():
            values.fill_(step)


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
        for number, step in enumerate(steps, start=1):
            change(engine, number)
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
        verify_contents(path)
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
        try:
            if world.is_main:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            save(2)
            text = "none"
        except SaveError as error:
            text = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    comm.barrier()
    return text, read_tree(Path(folder))


def verify_shares(folder: str) -> tuple[str, list[str]]:
    """What a run would go on from (or its error), and the files that this process verified of the
    first that was tried.
    """
    comm.initialize()
    seen: list[list[str]] = []
    original = Contents.verify

    def verify(self: Contents, names: Any = None, *others: Any) -> None:
        if others:  # rank 0 opens small files as well
            seen.append(list(names))
        original(self, names, *others)

    newest = newest_that_opens(Path(folder)) if comm.rank() == 0 else None
    with mock.patch.object(Contents, "verify", verify):
        try:
            chosen = newest_verified(newest, Path(folder))
        except CheckpointError as error:
            return f"{error.exit_status}: {error}", seen[0]
    return chosen.folder.name if chosen else "none", seen[0]
