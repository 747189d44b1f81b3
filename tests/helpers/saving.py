"""Saves of a tiny model with its disk recorded or failing, called in worker processes."""

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel import comm
from parallel.checkpoint_writer import SaveError, save
from parallel.commit import Retention
from parallel.fragments import fragments
from parallel.manifest import CheckpointError, Manifest
from parallel.zero import Engine
from tests.helpers.disk import audited, read_tree, recorded
from tests.helpers.training import Case, build_engine, model_yaml

Saving = Callable[[Engine, Path, int, Retention], None]


def save_now(engine: Engine, folder: Path, step: int, keep: Retention) -> None:
    """The synchronous way."""
    save(engine, folder, step, state={"step": step}, config_yaml=model_yaml(Case()), keep=keep)


def change(engine: Engine, step: int) -> None:
    """Makes the next checkpoint another one in every tensor."""
    for fragment in fragments(engine).values():
        for field in ("master", *engine.state_fields):
            fragment.view(field).fill_(step)


def record_saves(case: Case, folder: str, steps: list[int], last: int) -> dict[str, Any]:
    """Saves several times; gives all operations, where each save ended, and what it left.

    The folder's parent is there and empty.
    """
    engine, _ = build_engine(case)
    path = Path(folder)
    ends, trees = [], []
    with recorded() as recorder, audited(path.parent) as seen:
        for step in steps:
            change(engine, step)
            save_now(engine, path, step, Retention(last=last))
            comm.barrier()
            ends.append(recorder.operations[-1][0])
            trees.append(read_tree(path))
            comm.barrier()
    return {"operations": recorder.operations, "ends": ends, "trees": trees, "audited": seen}


def failing_save(case: Case, folder: str, faults: list[tuple[int, int, int]]) -> list[Any]:
    """For each (rank, operation, errno) a save that meets it.

    Every save is of step 2 and begins with a good checkpoint of step 1.

    Returns:
        For each the error ("none" if none), the operation that failed, whether step 1 is still
        what it was, and what became of step 2: "absent", "whole" or "broken".
    """
    engine, _ = build_engine(case)
    path, results = Path(folder), []
    change(engine, 1)
    save_now(engine, path, 1, Retention())
    change(engine, 2)
    before = read_tree(path)
    for rank, number, error in faults:
        comm.barrier()
        with recorded(number if comm.rank() == rank else None, error) as recorder:
            try:
                save_now(engine, path, 2, Retention(last=2))
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


def save_in_little_room(case: Case, folder: str, size: int) -> tuple[str, dict[str, Any]]:
    """A save in which the kernel itself refuses rank 0 files of more than `size` bytes."""
    engine, world = build_engine(case)
    save_now(engine, Path(folder), 1, Retention())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        save_now(engine, Path(folder), 2, Retention())
        text = "none"
    except SaveError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    comm.barrier()
    return text, read_tree(Path(folder))
