"""Runs whose disk is full, or whose folder disappears; called in workers."""

import resource
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

from polyad.train.loop.metrics import Metrics, TensorBoard
from tests.helpers.validations import ended


def run_with_full_records(config: Path, *overrides: str) -> tuple[str, str]:
    """`polyad train` where `metrics.jsonl` takes no byte: how it ends, and what it says."""
    usual = Path.open

    def opened(self: Path, *given: Any, **named: Any) -> Any:
        full = self.name == "metrics.jsonl" and given[:1] == ("a",)
        return usual(Path("/dev/full") if full else self, *given, **named)

    with mock.patch.object(Path, "open", opened):
        return ended(config, *overrides)


def error_of_a_full_tensorboard(folder: Path) -> str | None:
    """The file that an error names where the kernel refuses long files."""
    folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensorboard = TensorBoard(folder, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        for step in range(10_000):
            tensorboard.log(step, {"loss": 1.0}, {})
        tensorboard.close()
    except OSError as error:
        filename: str | None = error.filename
        return filename
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return None


def run_that_loses_its_folder(
    config: Path, step: int, moved: bool, *overrides: str
) -> tuple[str, str]:
    """`polyad train` whose folder is removed, or moved, by the main process after a step."""
    write = Metrics.write

    def then_gone(self: Metrics, record: dict[str, Any]) -> None:
        if record["step"] == step:
            go = self._folder
            if moved:
                go.rename(go.with_name("elsewhere"))
            else:
                shutil.rmtree(go)
        write(self, record)

    with mock.patch.object(Metrics, "write", then_gone):
        return ended(config, *overrides)
