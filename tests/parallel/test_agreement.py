"""Processes that share tokens send each token to the same experts, however they round."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from polyad.model.smoe.layer import SparseMoE
from polyad.train.loop.losses import LossConfig
from tests.helpers import training
from tests.helpers.everyday import everyday
from tests.helpers.training import Case, build_engine, emoe_model, moe_model

ROUNDING = 1e-6
"""What the second process's scores differ by."""


def _nearly_equal(rank: int) -> Any:
    """Gives experts 1 and 2 equal logits, but for rounding, which says who has more."""

    def hook(module: nn.Module, given: Any, logits_NE: Tensor) -> Tensor:
        columns = list(logits_NE.unbind(1))
        columns[2] = columns[1] + (ROUNDING if rank else -ROUNDING)
        return torch.stack(columns, 1)

    return hook


def train_with_near_ties(case: Case) -> dict[str, Any]:
    """Trains where rounding alone decides between two experts, otherwise on each process."""

    def engine_with_ties(*arguments: Any) -> Any:
        engine, world = build_engine(*arguments)
        for layer in engine.module.modules():
            if isinstance(layer, SparseMoE):
                hook = _nearly_equal(world.tensor_parallel_rank)
                layer.router.score.register_forward_hook(hook)
        return engine, world

    with mock.patch.object(training, "build_engine", engine_with_ties):
        return training.train(case)


pytestmark = pytest.mark.distributed

MODELS = {
    "smoe": moe_model(),
    "one expert": moe_model(top_k=1),
    "attention": moe_model(graph="attention"),
    "emoe": emoe_model(),
    "emoe, learned": emoe_model(score="linear"),
}


@everyday("layout", [(2, 2, 1), (4, 2, 2)], keep=[(4, 2, 2)], ids=str)
@everyday("name", MODELS, keep=["smoe"])
def test_experts_are_those_of_one_process_where_another_rounds_differently(workers, name, layout):
    processes, tensor, expert = layout
    case = Case(
        optimizer="sgd", learning_rate=0.1, model=MODELS[name], last_step=3,
        losses=LossConfig(load_balance=0.01, router_z=0.001),
    )  # fmt: skip
    expected = workers(1).run(train_with_near_ties, case)[0]
    case = case.but(stage=1, tensor=tensor, expert=expert)
    results = workers(processes).run(train_with_near_ties, case)
    assert all(result == results[0] for result in results)
    for measure in ("losses", "norms"):
        ours, theirs = (torch.tensor(each[measure]) for each in (results[0], expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
