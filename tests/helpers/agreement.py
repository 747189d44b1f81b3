"""Tensor-parallel processes whose routers round differently; called in worker processes."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from polyad.model.smoe.layer import SparseMoE
from tests.helpers import training
from tests.helpers.training import Case, build_engine

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


def selected_by_other_scores(case: Case) -> list[Any]:
    """What each process takes where all of them have scores of their own."""
    engine, world = build_engine(case)
    generator = torch.Generator().manual_seed(world.tensor_parallel_rank)
    layer = engine.module.blocks[1].feed_forward  # type: ignore[union-attr, index]
    scores_NE = torch.rand(40, layer.config.num_experts, generator=generator).softmax(-1)
    selected = layer.router.selection(scores_NE)
    return [selected.expert_ids_NK.tolist(), selected.priority_N.tolist()]
