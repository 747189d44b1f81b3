"""Factorized experts over processes: blocks, ranks rounded up, BatchNorm of gates."""

import pytest

from polyad.model.decoder import GPT2Config
from polyad.model.mumoe.config import MuMoEConfig
from tests.helpers.everyday import everyday
from tests.helpers.factors import (
    batch_norm_against_the_whole,
    block_against_the_whole,
    padding_after_training,
    train_as_it_is,
)
from tests.helpers.parity import assert_same_course
from tests.helpers.training import MODEL, Case, mumoe_model, train

pytestmark = pytest.mark.distributed

SGD = Case(optimizer="sgd", learning_rate=0.1, clip=0.5)
CP = mumoe_model(factorization="cp", rank=8)
TR = mumoe_model(factorization="tr", num_experts=[4, 3])
# Every rule of what is cut and where gradients are summed.
CUT = {
    "cp": CP,
    "tr": TR,
    "cp, more experts than the model is wide": mumoe_model(rank=8, num_experts=[40, 2]),
    "cp, normalized input, no bias": mumoe_model(rank=8, gate_input="normalized", bias=False),
    "tr, cut along the rank": mumoe_model(factorization="tr", expert_rank=3, rank=8),
    "tt": mumoe_model(factorization="tt", rank=8, num_experts=[4, 3]),
    "tt, cut along the rank": mumoe_model(factorization="tt", rank=8, expert_rank=3),
    "tucker": mumoe_model(factorization="tucker", rank=8, num_experts=[4, 3]),
    "softmax": mumoe_model(rank=8, gate="softmax"),
    "cp, gated": mumoe_model(rank=8, activation="swiglu"),
    "tr, gated": mumoe_model(factorization="tr", num_experts=[4, 3], activation="geglu"),
}
# Ranks that nothing divides.
ODD = {
    "cp": mumoe_model(factorization="cp"),
    "tr": TR,
    "tt": mumoe_model(factorization="tt"),
    "tucker": mumoe_model(factorization="tucker", rank=5),
    "gated": mumoe_model(activation="swiglu"),
}


@everyday("parts", [2, 4], keep=[4])
@everyday("model", CUT.values(), keep=["cp"], ids=list(CUT))
def test_a_cut_block_has_the_output_and_the_gradients_of_the_whole(workers, model, parts):
    results = workers(parts).run(block_against_the_whole, model, parts, 9)
    assert all(max(result.values()) < 1e-10 for result in results)


@everyday("model", ODD.values(), keep=["tr"], ids=ODD)
def test_ranks_are_stored_rounded_up_and_change_nothing(workers, model):
    rank = model.feed_forward.rank
    assert rank % 8
    case = Case(model=model, stage=1)
    (found,) = workers(1).run(padding_after_training, case)
    assert {name.rpartition(".")[2] for name in found} >= {"input_factor", "output_factor"}
    for name, (shape, largest) in found.items():
        assert 8 in shape or 16 in shape, name
        assert largest == 0, name
    plain, ours = (workers(1).run(way, SGD.but(model=model))[0] for way in (train_as_it_is, train))
    assert_same_course(ours, plain)


def with_batch_norm(**changes) -> GPT2Config:
    """A language model refuses such a gate: so it is put into it past the check."""
    options = {"num_experts": (5, 2), "rank": 8, "hidden_size": 24, "gate_norm": "batch"}
    return MODEL.model_copy(update={"feed_forward": MuMoEConfig(**(options | changes))})


@pytest.mark.parametrize("model", [with_batch_norm(), with_batch_norm(factorization="tr")])
@everyday(
    ("processes", "given"),
    # Tensor-parallel processes, tokens, and how many more each has than the one before.
    [(2, (1, 6, 0)), (4, (1, 6, 0)), (4, (2, 6, 0)), (2, (1, 3, 9))],
    keep=[(4, (2, 6, 0)), (2, (1, 3, 9))],
)
def test_output_gradients_and_statistics_are_those_of_all_tokens(workers, model, processes, given):
    for result in workers(processes).run(batch_norm_against_the_whole, model, *given):
        assert max(result.values()) < 1e-10, result
