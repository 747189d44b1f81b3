"""Fixtures of the whole suite."""

import argparse
import gc
import inspect
import json
import pydoc_data.topics
import shutil
import signal
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.launch.cli import run as polyad
from tests.helpers.forking import ForkServer
from tests.helpers.workers import WorkerPool

pytest_plugins = ["tests.slices"]

# A shell that starts the suite in the background has it ignore Ctrl-C, and so does every process
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Models in tests are tiny: a second thread mostly waits, and for long where the cores are busy.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What is imported now stays: the garbage collector would look through it again and again."""
    gc.collect()
    gc.freeze()


SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.fixture(scope="session")
def workers(forks: ForkServer) -> Iterator[Callable[[int], WorkerPool]]:
    """Gives a pool of n reused processes: `workers(2).run(function, ...)`."""
    pools: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        return pools.setdefault(world_size, WorkerPool(world_size, forks))

    yield pool
    for each in pools.values():
        each.stop()


@pytest.fixture(autouse=True)
def variables_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command leaves in this process would reach all that later tests start: a process that
    computes alone stays on loopback, and `python -m` does not find modules in the folder it is in.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """A command that fails leaves its process group, which its process would end with."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Gives the one line that a command refuses with: `refused("convert", folder, ...)`."""

    def line_of(*words: object) -> str:
        capfd.readouterr()  # what was said before
        assert polyad([str(word) for word in words]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.isprintable()
        assert line.startswith("polyad: error: ")
        return line

    return line_of


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Starts whole runs as processes of their own, which can be killed: `forks.start(...)`."""
    server = ForkServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"no small real data in {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def library_text() -> str:
    """Some 300 KB of real text with blank lines, long lines and non-ASCII characters."""
    modules = (typing, argparse, pydoc_data.topics)
    return "".join(inspect.getsource(module) for module in modules) + "Ünïcödé 漢字 🙂\n"


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory, library_text: str) -> Path:
    """A folder of 60 small documents, all from the standard library."""
    path = tmp_path_factory.mktemp("texts") / "modules.jsonl"
    size = len(library_text) // 60
    with path.open("w") as file:
        for number in range(60):
            # Of different lengths, so that samples begin and end everywhere.
            text = library_text[number * size : (number + 1) * size - number * 37]
            file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture(scope="session")
def prepared_path(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    """Every twentieth text is held out."""
    path = tmp_path_factory.mktemp("prepared")
    lines = dict(enumerate(texts.read_text().splitlines(keepends=True)))
    held_out = {}
    for split, numbers in (("validation", (1, 20, 40)), ("test", (2, 21, 41))):
        (path / f"{split}.jsonl").write_text("".join(lines.pop(number) for number in numbers))
        held_out[f"{split}_source"] = str(path / f"{split}.jsonl")
    (path / "train.jsonl").write_text("".join(lines.values()))
    prepare(str(path / "train.jsonl"), "train:400", path / "modules", **held_out)
    return path / "modules"


@pytest.fixture
def copy(prepared_path: Path, tmp_path: Path) -> Path:
    """A copy of the prepared data, to change or to damage."""
    return Path(shutil.copytree(prepared_path, tmp_path / "corpus"))


@pytest.fixture
def prepared(prepared_path: Path) -> PreparedData:
    return PreparedData.open(prepared_path)
