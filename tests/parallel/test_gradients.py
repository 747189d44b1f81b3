"""Gradients of bf16 models are summed in fp32, also those that arrive in another order."""

from unittest import mock

import pytest
from torch import Tensor

from polyad.model.decoder import Decoder
from polyad.parallel import comm
from polyad.train.loop import optimizer
from tests.helpers.everyday import everyday
from tests.helpers.gradients import mean_gradient
from tests.helpers.parity import assert_near_state, assert_same_course
from tests.helpers.training import MODEL, Case, train

pytestmark = pytest.mark.distributed

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
