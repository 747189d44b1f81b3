"""A little real text, prepared once, and a run that is small enough to start often."""

import os
from pathlib import Path

import pytest

from polyad.launch.cli import run
from tests.helpers import started
from tests.helpers.runs import write_config
from tests.helpers.started import SMALL


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Nine modules of the standard library as text files."""
    folder = tmp_path_factory.mktemp("text")
    library = Path(os.__file__).parent
    names = ("abc", "argparse", "bisect", "calendar", "cmd", "copy", "csv", "glob", "heapq")
    for name in names:
        (folder / f"{name}.txt").write_text((library / f"{name}.py").read_text(encoding="utf-8"))
    return folder


@pytest.fixture(scope="session")
def data(text, tmp_path_factory):
    """The same, prepared."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    options = ["--validation-fraction", "0.2", "--tokenizer", "train:400", "--output", str(folder)]
    assert run(["prepare", "--source", str(text), *options]) == 0
    return folder


@pytest.fixture
def config(tmp_path, data):
    """A small configuration whose run folder does not exist yet."""
    return write_config(tmp_path / "small.yaml", data, **SMALL)


@pytest.fixture(scope="session")
def polyad():
    """Runs a command in a process of its own, from the clone."""
    return started.polyad


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, data, polyad):
    """A run of two processes to its end, and what `polyad launch` printed."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder / "small.yaml", data, **SMALL)
    done = polyad("launch", config, "--processes-per-node", 2, "seed=7")
    return folder / "run", done
