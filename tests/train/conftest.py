"""Finished runs that several files read."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from polyad.train.exchange.convert import convert
from tests.helpers.fine_tuned import trainer
from tests.helpers.runs import FEED_FORWARDS, run, write_config


@pytest.fixture
def config(request, tmp_path, prepared_path) -> Path:
    """The configuration of a small run that has not begun, with `RUN_CHANGES` of the file."""
    changes = getattr(request.module, "RUN_CHANGES", {})
    return write_config(tmp_path / "config.yaml", prepared_path, **changes)


@pytest.fixture(scope="session")
def trained(workers, tmp_path_factory, prepared_path) -> Callable[[str], Path]:
    """Gives the folder of a finished run of 6 steps by 2 processes, by kind of feed-forward.

    For reading alone: other tests get the same one.
    """

    @cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        changes = {"model__feed_forward": FEED_FORWARDS[kind]}
        config = write_config(folder / "config.yaml", prepared_path, **changes)
        assert workers(2).run(run, config) == [6, 6]
        return folder / "run"

    return make


@pytest.fixture(scope="module")
def run_of(workers, tmp_path_factory, prepared_path) -> Callable[..., Path]:
    """Trains with changes of a small run's configuration, and gives the run's folder."""

    def train(processes: int = 1, **changes) -> Path:
        folder = tmp_path_factory.mktemp("run")
        workers(processes).run(run, write_config(folder / "config.yaml", prepared_path, **changes))
        return folder / "run"

    return train


@pytest.fixture(scope="session")
def fine_tuned(workers, tmp_path_factory) -> Callable[..., Path]:
    """Trains on tables of labelled sequences, and gives the run's folder: see `trainer`."""
    return trainer(workers, tmp_path_factory)


@pytest.fixture(scope="session")
def finished(trained):
    """A finished run of two processes, whose checkpoint therefore lies in two shards."""
    return trained("dense")


@pytest.fixture(scope="session")
def exported(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "gpt2"
    convert(finished, folder, "huggingface")
    return folder


@pytest.fixture(scope="session")
def plain(trained, tmp_path_factory):
    """Gives a folder of safetensors under our names, by kind of feed-forward."""

    @cache
    def make(kind):
        folder = tmp_path_factory.mktemp(kind) / "plain"
        convert(trained(kind), folder, "safetensors")
        return folder

    return make


@pytest.fixture
def even(monkeypatch):
    """An example measure, in the registry of this process for one test."""
    from polyad.train.measures.registry import MEASURES
    from tests.helpers.even import EvenExperts

    monkeypatch.setitem(MEASURES, "even", EvenExperts)
    monkeypatch.setenv("POLYAD_PLUGINS", "tests.helpers.even")
    yield EvenExperts
    monkeypatch.undo()
    MEASURES.pop("even", None)
