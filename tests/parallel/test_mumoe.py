"""Factorized experts over processes: n of them compute what one computes."""

import itertools

import pytest
import torch

from polyad.parallel.weights import load_model
from tests.helpers.everyday import everyday
from tests.helpers.factors import padding_after_training, train_as_it_is
from tests.helpers.parity import (
    assert_equal_state,
    assert_near_state,
    assert_same_course,
    assert_same_routing,
    near,
)
from tests.helpers.training import Case, mumoe_model, resave, tensors, train

pytestmark = pytest.mark.distributed

SGD = Case(optimizer="sgd", learning_rate=0.1, clip=0.5)


MODELS = {
    "cp": mumoe_model(factorization="cp"),
    "tr": mumoe_model(factorization="tr", num_experts=[4, 3]),
    "tt": mumoe_model(factorization="tt"),
    "tucker": mumoe_model(factorization="tucker", rank=5),
}


@everyday(
    ("name", "stage"),
    itertools.product(MODELS, [0, 1, 2, 3]),
    keep=[("tr", 3), ("tucker", 2), ("tt", 0), ("cp", 1)],
)
def test_sgd_gives_equal_losses_norms_weights_and_statistics(
    workers, whole_runs, tmp_path, name, stage
):
    case = SGD.but(model=MODELS[name])
    expected, folder = whole_runs(case)
    assert all(norm > 0.5 for norm in expected["norms"])  # so that the clip is active
    results = workers(2).run(train, case.but(stage=stage, save_to=str(tmp_path)))
    assert all(result == results[0] for result in results)
    assert_same_course(results[0], expected)
    assert_near_state(tmp_path / "step-00000004", folder)
    gate = "blocks.0.feed_forward.gate.weight", "master"
    assert tensors(folder)[gate].abs().max() > 1e-3  # it has left its zero
    assert_same_routing(results[0], expected)
    last = set(expected["routing"][-1])
    measured = {"load_max", "unused", "entropy", "effective_experts", "dominated"}
    assert {f"routing/{name}" for name in measured} <= last
    assert {f"routing/blocks.1.feed_forward/{name}" for name in ("load", "dominant")} <= last


@everyday("stage", [1, 3], keep=[3])
def test_a_checkpoint_goes_into_another_layout_and_back_unchanged(
    workers, whole_runs, tmp_path, stage
):
    _, folder = whole_runs(SGD.but(model=MODELS["tr"]))
    case = SGD.but(model=MODELS["tr"], stage=stage, first_step=4)
    there, back = tmp_path / "there", tmp_path / "back"
    workers(2).run(resave, case.but(resume=str(folder), save_to=str(there)))
    path = there / "step-00000004"
    workers(1).run(resave, case.but(stage=0, resume=str(path), save_to=str(back)))
    assert_equal_state(back / "step-00000004", folder)


@everyday("stage", [1, 3], keep=[3])
def test_bf16_stays_near_fp32(workers, whole_runs, stage):
    case = Case(learning_rate=1e-3, model=MODELS["cp"])
    expected, _ = whole_runs(case)
    result = workers(2).run(train, case.but(stage=stage, precision="bf16"))[0]
    assert near(result["losses"], expected["losses"], 2e-3)


@pytest.mark.slow
def test_recomputation_changes_nothing(workers, whole_runs):
    case = SGD.but(model=MODELS["cp"])
    expected, _ = whole_runs(case)
    model = MODELS["cp"].model_copy(update={"recompute": "block"})
    result = workers(2).run(train, case.but(stage=3, model=model))[0]
    assert_same_course(result, expected)
    assert_same_routing(result, expected)  # counted once, though every block ran twice


@everyday("model", MODELS.values(), keep=["cp", "tr"], ids=MODELS)
def test_ranks_are_stored_rounded_up_and_change_nothing(workers, model):
    rank = model.feed_forward.rank
    assert rank % 8
    case = Case(model=model, stage=0)
    (found,) = workers(1).run(padding_after_training, case)
    assert {name.rpartition(".")[2] for name in found} >= {"input_factor", "output_factor"}
    for name, (shape, largest) in found.items():
        assert 8 in shape or 16 in shape, name
        assert largest == 0, name
    plain, ours = (workers(1).run(way, SGD.but(model=model))[0] for way in (train_as_it_is, train))
    for name in ("losses", "norms"):
        pair = (torch.tensor(each[name]) for each in (ours, plain))
        torch.testing.assert_close(*pair, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_a_checkpoint_has_the_rank_that_was_asked_for(workers, tmp_path):
    for stage in (0, 1, 3):
        place = tmp_path / str(stage)
        workers(2).run(train, Case(model=MODELS["cp"], stage=stage, save_to=str(place)))
        shapes = {key: value.shape for key, value in tensors(place / "step-00000004").items()}
        assert shapes["blocks.0.feed_forward.up.input_factor", "master"] == (37, 7)
        assert shapes["blocks.0.feed_forward.up.output_factor", "exp_avg"] == (7, 24)
        assert shapes["blocks.0.feed_forward.up.expert_factor_0", "exp_avg_sq"] == (5, 7)


@everyday(("processes", "tensor", "stage"), [(1, 1, 0), (2, 1, 3), (2, 2, 1)], keep=[(2, 2, 1)])
def test_a_run_that_begins_with_softmax_goes_on_with_entmax(
    workers, tmp_path, processes, tensor, stage
):
    # Steps 0 and 1 are those of a softmax gate, and 2 and 3 of an entmax gate that goes on.
    softmax = mumoe_model(rank=8, gate="softmax")
    first = SGD.but(model=softmax, last_step=2, save_to=str(tmp_path / "softmax"))
    expected = workers(1).run(train, first)[0]["losses"]
    folder = tmp_path / "softmax" / "step-00000002"
    entmax = SGD.but(model=mumoe_model(rank=8), first_step=2, resume=str(folder))
    expected += workers(1).run(train, entmax)[0]["losses"]
    case = SGD.but(
        model=mumoe_model(rank=8, softmax_share=0.5), total_steps=4, tensor=tensor, stage=stage
    )
    whole = workers(processes).run(train, case)[0]["losses"]
    assert whole == pytest.approx(expected, rel=1e-5)
    losses = []
    for step in range(4):  # as if the run had been interrupted after each step
        resume = str(tmp_path / f"step-{step:08}") if step else None
        part = case.but(first_step=step, last_step=step + 1, resume=resume, save_to=str(tmp_path))
        losses += workers(processes).run(train, part)[0]["losses"]
    assert losses == pytest.approx(expected, rel=1e-5)
    # A checkpoint is evaluated with the gate that its next step would have.
    ids_BT = torch.arange(16).view(1, 16)
    for step, gate in ((1, "softmax"), (2, "entmax15"), (4, "entmax15")):
        model = load_model(tmp_path / f"step-{step:08}")
        seen_MN = []
        model.blocks[1].feed_forward.gate.register_forward_hook(
            lambda _, __, output, seen_MN=seen_MN: seen_MN.extend(output.coefficients)
        )
        model(ids_BT)
        assert bool(seen_MN[0].all()) == (gate == "softmax")
