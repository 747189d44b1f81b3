"""Gradients that arrive in another order on another process are summed with their like."""

import pytest
from torch import Tensor

from polyad.model.decoder import Decoder
from polyad.parallel import comm
from tests.helpers.parity import assert_near_state, assert_same_course
from tests.helpers.training import Case, train

pytestmark = pytest.mark.distributed

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
