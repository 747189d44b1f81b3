"""Saves of a tiny model with its disk recorded or failing, called in worker processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from polyad.parallel.checkpoint.manage import Retention
from polyad.parallel.checkpoint.save import Saver, save_weights
from polyad.parallel.zero import Engine, fragments
from tests.helpers.training import Case, model_yaml

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
