"""Gradients of bf16 models are summed in fp32, also those that arrive in another order."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from polyad.model.decoder import Decoder
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import MASTER
from polyad.parallel.config import ParallelConfig
from polyad.parallel.parallelize import _allocate
from polyad.parallel.zero import DTYPES, STATE_TENSORS, Engine, deepspeed_config, fragments
from polyad.train.loop import optimizer
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_near_state, assert_same_course
from tests.helpers.training import MODEL, Case, build_engine, train

pytestmark = pytest.mark.distributed


SIZE = 61


class Linear(nn.Module):
    """One weight whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE, device="meta"))

    def forward(self, x_S: Tensor) -> Tensor:
        """The sum of all products, a loss."""
        return (self.weight * x_S).float().sum()


def settings(
    stage: int, precision: str, steps: int, num_parameters: int = SIZE, **keys: Any
) -> dict[str, Any]:
    """What DeepSpeed is told of an engine that adds up so many micro-batches of one sample."""
    return deepspeed_config(
        ParallelConfig(zero_stage=stage, **keys),
        precision=precision,
        micro_batch_size=1,
        accumulation_steps=steps,
        clip_grad_norm=0.0,
        num_parameters=num_parameters,
    )


def mean_gradient(stage: int, gradients: list[list[float]]) -> tuple[list[float], bool]:
    """The gradient that the optimizer gets from gradients of [micro-batch][rank] in bf16.

    Returns:
        Its distinct values here, and whether DeepSpeed's throughput timer runs.
    """
    world = comm.initialize()
    config = settings(stage, "bf16", len(gradients))
    module = Linear()
    _allocate(module, world, DTYPES["bf16"], config, None)
    engine = Engine(
        module,
        torch.optim.SGD([{"params": module.parameters(), STATE_TENSORS: ()}], lr=1.0),
        config,
        world=world,
        cross_entropy=lambda logits, targets: logits,
    )
    for of_ranks in gradients:
        x_S = torch.full((SIZE,), of_ranks[world.rank], dtype=torch.bfloat16)
        engine.backward(engine.deepspeed(x_S))
        engine.step(1.0)
    moved = -fragments(engine)["weight"].values[MASTER]
    return moved.unique().tolist(), engine.deepspeed.tput_timer.config.enabled


def rates_of_blocks(case: Case) -> list[tuple[str, float]]:
    """What share of the images stays in each block of a model in training, and its precision."""
    engine, _ = build_engine(case)
    shares = [block.drop_path.keep for block in engine.module.blocks]
    return [(str(share.dtype), share.item()) for share in shares]


# [micro-batch][rank], each of them exact in bf16, which keeps 8 bits: 256 + 1 is 256 there.
GRADIENTS = [[256.0, 1.0, 3.0], [1.0, 1.0, 1.0]]


@everyday("processes", [2, 3], keep=[3])
@everyday("stage", [1, 2, 3], keep=[2])
def test_bf16_gradients_are_summed_in_fp32(workers, stage, processes):
    # Three processes: a third is no number of bf16, so division has to be fp32's as well.
    for micro_batches in (1, 2):
        gradients = GRADIENTS[:micro_batches]
        exact = sum(sum(row[:processes]) for row in gradients) / processes / micro_batches
        for values, times in workers(processes).run(mean_gradient, stage, gradients):
            assert values == [pytest.approx(exact, rel=1e-6)]
            assert not times  # DeepSpeed's timer would wait for the device in every micro-batch


SGD = Case(optimizer="sgd", learning_rate=0.1, last_step=2)


def embed_the_other_way_round(self: Decoder, input_ids_BT: Tensor, positions_T: Tensor) -> Tensor:
    x_BTD = self.position_embedding(positions_T) + self.token_embedding(input_ids_BT)
    embedded_BTD: Tensor = self.dropout(x_BTD)
    return embedded_BTD


def train_in_another_order(case: Case):
    """As `train`, but autograd comes to the embeddings in another order on every second process."""
    own = Decoder.embed
    if comm.initialize().rank % 2:
        Decoder.embed = embed_the_other_way_round
    try:
        return train(case)
    finally:
        Decoder.embed = own


@pytest.mark.parametrize("stage", [1, 2])  # at stage 3 DeepSpeed asks all for one order
def test_processes_may_come_to_parameters_in_another_order(workers, whole_runs, tmp_path, stage):
    case = SGD.but(stage=stage, save_to=str(tmp_path))
    expected, saved = whole_runs(SGD)
    for result in workers(2).run(train_in_another_order, case):
        assert_same_course(result, expected)
    assert_near_state(tmp_path / "step-00000002", saved)


def train_with_a_fused_update(case: Case):
    """As `train`, with the optimizer of a GPU."""
    with mock.patch.object(optimizer, "on_cpu", return_value=False):
        return train(case)


@everyday(
    ("clip", "processes", "poison_step"),
    [(0.1, 1, -1), (0.1, 2, 1), (1e3, 1, -1), (0.0, 2, -1)],
    keep=[(0.1, 2, 1)],
)
def test_a_fused_update_clips_as_a_pass_before_it(workers, tmp_path, clip, processes, poison_step):
    # Adam makes any number of a gradient that is rounding, as that of the bias of keys is.
    model = MODEL.model_copy(update={"bias": False})
    case = Case(clip=clip, model=model, poison="gradient", poison_step=poison_step)
    results = []
    for run in (train, train_with_a_fused_update):
        folder = tmp_path / run.__name__
        results.append(workers(processes).run(run, case.but(save_to=str(folder)))[0])
    plain, fused = results
    assert fused["applied"] == plain["applied"] == [step != poison_step for step in range(4)]
    assert fused["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    last = "step-00000004"
    assert_near_state(tmp_path / "train_with_a_fused_update" / last, tmp_path / "train" / last)
