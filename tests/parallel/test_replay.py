"""Experts that were recorded on one layout are taken again on another; loads that are forced."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel import comm
from polyad.train.experts.replay import (
    force_equal_loads,
    read_choices,
    recording,
    replaying,
    write_choices,
)
from polyad.train.loop.losses import LossConfig
from tests.helpers import training
from tests.helpers.everyday import everyday
from tests.helpers.training import Case, build_engine, moe_model

pytestmark = pytest.mark.distributed


@contextmanager
def engines_in(context_of: Callable[[Any, comm.World], Any]) -> Iterator[None]:
    """Builds every engine in a context, made for its model and this process, until all is done."""
    with ExitStack() as stack:

        def build(*arguments: Any) -> Any:
            engine, world = build_engine(*arguments)
            stack.enter_context(context_of(engine.module, world))
            return engine, world

        with mock.patch.object(training, "build_engine", build):
            yield


def train_recording(case: Case, path: Path) -> dict[str, Any]:
    """Trains a case, and writes what all processes have chosen."""

    @contextmanager
    def record(module: nn.Module, world: comm.World) -> Iterator[None]:
        with recording(module) as recorder:
            yield
        if (choices := recorder.of_all(world)) is not None:
            write_choices(path, choices, {})

    with engines_in(record):
        return training.train(case)


def train_replaying(case: Case, path: Path) -> dict[str, Any]:
    """Trains a case with recorded experts, where routers by themselves would select others."""

    def replay(module: nn.Module, world: comm.World) -> Any:
        for layer in module.modules():
            if isinstance(layer, SelectingMoE):
                selection = layer.router.selection
                ours = selection.agreed
                selection.agreed = lambda x, ours=ours: (ours(x) + 1) % 4
        choices, _ = read_choices(path)
        rank, ranks = world.data_parallel_rank, world.data_parallel_size
        return replaying(module, choices, rank=rank, ranks=ranks)

    with engines_in(replay):
        return training.train(case)


def train_forced(case: Case) -> dict[str, Any]:
    """Trains a case whose experts have equal loads."""

    def force(module: nn.Module, world: comm.World) -> Any:
        force_equal_loads(module)
        return nullcontext()

    with engines_in(force):
        return training.train(case)


CASE = Case(
    optimizer="sgd",
    learning_rate=0.1,
    model=moe_model().model_copy(update={"recompute": "block"}),
    last_step=2,
    losses=LossConfig(load_balance=0.01, router_z=0.001),
)
LAYOUTS = {
    "expert": (2, {"stage": 1, "expert": 2}),
    "tensor": (2, {"stage": 1, "tensor": 2}),
    "both": (4, {"stage": 2, "tensor": 2, "expert": 2}),
    "sequence": (2, {"tensor": 2, "sequence": True}),
    "stage 3": (2, {"stage": 3}),
}


@everyday("name", LAYOUTS, keep=["expert"])
def test_a_recording_of_one_layout_is_replayed_on_another(workers, tmp_path, name):
    processes, changes = LAYOUTS[name]
    one, several = CASE, CASE.but(**changes)
    expected = workers(1).run(train_recording, one, tmp_path / "one.safetensors")[0]
    for result in workers(processes).run(train_replaying, several, tmp_path / "one.safetensors"):
        assert_near(result, expected)
    expected = workers(processes).run(train_recording, several, tmp_path / "several.safetensors")[0]
    again = workers(1).run(train_replaying, one, tmp_path / "several.safetensors")[0]
    assert_near(again, expected)
    both = [read_choices(tmp_path / f"{each}.safetensors")[0] for each in ("one", "several")]
    for layer, ours in both[0].items():
        theirs = both[1][layer]
        # 8 sequences of 2 steps, in the order of samples; rounding may decide between two experts.
        assert ours.tokens_R.tolist() == theirs.tokens_R.tolist() == [17] * 16
        assert (ours.expert_ids_NK == theirs.expert_ids_NK).double().mean() > 0.95


@everyday("name", LAYOUTS, keep=["expert"])
def test_forced_loads_are_those_of_one_process(workers, name):
    processes, changes = LAYOUTS[name]
    expected = workers(1).run(train_forced, CASE)[0]
    for result in workers(processes).run(train_forced, CASE.but(**changes)):
        assert_near(result, expected)
        # 34 tokens of a micro-batch, each with 2 of 4 experts.
        loads = result["routing"][0]
        assert loads["routing/blocks.0.feed_forward/load_max"] == 1
        assert loads["routing/load_max"] == 1


def assert_near(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for measure in ("losses", "norms"):
        found, expected = (torch.tensor(each[measure]) for each in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
