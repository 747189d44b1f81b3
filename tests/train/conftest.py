"""Finished runs that several files read."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from polyad.train.exchange.convert import convert
from tests.helpers import sequences as made
from tests.helpers.fine_tuned import KINDS, Rows
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
    """Trains a small model on tables of labelled sequences, and gives the run's folder."""

    def trained(
        name: str,
        train_rows: Rows,
        held_out: Rows,
        steps: int = 4,
        data: dict[str, Any] | None = None,
        processes: int = 1,
        **changes: Any,
    ) -> Path:
        root = tmp_path_factory.mktemp(name)
        made.byte_tokenizer(root)
        made.write(root / "table" / "train.csv", train_rows)
        made.write(root / "table" / "dev.csv", held_out)
        given = {
            "model": {
                "kind": "gpt2", "num_layers": 2, "hidden_size": 16, "num_heads": 2,
                "sequence_length": 96, "head": {"kind": "classification"},
                "feed_forward": KINDS.get(name, KINDS["smoe"]),
            },
            "data": {
                "kind": "sequences", "path": str(root / "table"),
                "tokenizer": str(root / "tokenizer.json"), **(data or {}),
            },
            "train": {
                "steps": steps, "global_batch_size": 8, "micro_batch_size": 4, "precision": "fp32",
            },
            "optimizer": {"learning_rate": 0.02}, "schedule": {}, "checkpoint": {},
            "evaluation": {"every": 2}, "log": {"trackers": []},
        }  # fmt: skip
        config = write_config(root / "config.yaml", root / "table", **given | changes)
        workers(processes).run(run, config)
        return root / "run"

    return trained


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
