"""Cut factors: n tensor-parallel processes compute what one computes, and exchange little."""

import pytest
import torch

from polyad.model.build import num_parameters
from polyad.model.gpt2 import GPT2Config
from polyad.parallel.shard import Axis, Placement
from tests.helpers.everyday import everyday
from tests.helpers.factors import block_against_the_whole, logits, traffic_of_a_block
from tests.helpers.parity import assert_near_state, assert_same_course, near
from tests.helpers.training import (
    MODEL,
    Case,
    inspect_shards,
    mumoe_model,
    resave,
    tensors,
    train,
)
from tests.parallel.test_tensor import gathered

pytestmark = pytest.mark.distributed

SGD = Case(optimizer="sgd", learning_rate=0.1, clip=0.5)
CP = mumoe_model(factorization="cp", rank=8)
TR = mumoe_model(factorization="tr", num_experts=[4, 3])
# Every rule of what is cut and where gradients are summed.
MODELS = {
    "cp": CP,
    "tr": TR,
    "cp, more experts than the model is wide": mumoe_model(rank=8, num_experts=[40, 2]),
    "cp, normalized input, no bias": mumoe_model(rank=8, gate_input="normalized", bias=False),
    "tr, cut along the rank": mumoe_model(factorization="tr", expert_rank=3, rank=8),
    "tt": mumoe_model(factorization="tt", rank=8, num_experts=[4, 3]),
    "tt, cut along the rank": mumoe_model(factorization="tt", rank=8, expert_rank=3),
    "tucker": mumoe_model(factorization="tucker", rank=8, num_experts=[4, 3]),
    "softmax": mumoe_model(rank=8, gate="softmax"),
}
DROPPING = {
    "cp": mumoe_model(rank=8, expert_dropout=0.3),
    "tr": mumoe_model(factorization="tr", num_experts=[4, 3], expert_dropout=0.3),
}
# (processes, tensor-parallel ones, stage)
LAYOUTS = [*((n, 2, stage) for n in (2, 4) for stage in (0, 1, 2, 3)), (4, 4, 1)]
ON_LAYOUTS = [(name, *layout) for name in ("cp", "tr") for layout in LAYOUTS]


def assert_equal_runs(workers, whole_runs, folder, case, processes, tensor, stage):
    expected, weights_of = whole_runs(case)
    there = case.but(tensor=tensor, stage=stage, save_to=str(folder))
    results = workers(processes).run(train, there)
    assert all(result["losses"] == results[0]["losses"] for result in results)
    assert_same_course(results[0], expected)
    assert_near_state(folder / "step-00000004", weights_of)
    for ours, theirs in zip(results[0]["routing"], expected["routing"], strict=True):
        assert ours.keys() == theirs.keys()
        load = "routing/blocks.1.feed_forward/load"
        assert ours[load] == pytest.approx(theirs[load], rel=1e-4, abs=1e-6)


@everyday(
    ("name", "processes", "tensor", "stage"), ON_LAYOUTS, keep=[("cp", 2, 2, 3), ("tr", 4, 2, 2)]
)
def test_sgd_gives_equal_losses_norms_weights_and_statistics(
    workers, whole_runs, tmp_path, name, processes, tensor, stage
):
    case = SGD.but(model=MODELS[name])
    assert all(norm > 0.5 for norm in whole_runs(case)[0]["norms"])  # so that the clip is active
    assert_equal_runs(workers, whole_runs, tmp_path, case, processes, tensor, stage)


@everyday("parts", [2, 4], keep=[4])
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_cut_block_has_the_output_and_the_gradients_of_the_whole(workers, model, parts):
    results = workers(parts).run(block_against_the_whole, model, parts, 9)
    assert all(max(result.values()) < 1e-10 for result in results)


@everyday("model", [CP, TR], keep=["cp"], ids=["cp", "tr"])
@everyday(("processes", "stage"), [(2, 0), (4, 2)], keep=[(4, 2)])
def test_adamw_gives_equal_losses(workers, whole_runs, model, processes, stage):
    case = Case(learning_rate=1e-3, model=model)
    expected, _ = whole_runs(case)
    result = workers(processes).run(train, case.but(stage=stage, tensor=2))[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [CP, TR], ids=["cp", "tr"])
def test_bf16_stays_near_fp32(workers, whole_runs, model):
    case = Case(learning_rate=1e-3, model=model)
    expected, _ = whole_runs(case)
    result = workers(2).run(train, case.but(stage=1, tensor=2, precision="bf16"))[0]
    assert near(result["losses"], expected["losses"], 2e-3)


@everyday("name", DROPPING, keep=["cp"])
def test_tensor_parallel_processes_drop_the_experts_of_one_process(workers, whole_runs, name):
    case = SGD.but(model=DROPPING[name])
    expected, _ = whole_runs(case)
    assert expected["losses"] != whole_runs(SGD.but(model={"cp": CP, "tr": TR}[name]))[0]["losses"]
    recomputing = DROPPING[name].model_copy(update={"recompute": "block"})
    for model in (DROPPING[name], recomputing):
        results = workers(2).run(train, case.but(model=model, tensor=2, stage=1))
        assert results[0]["losses"] == results[1]["losses"]
        for key in ("losses", "norms"):
            assert results[0][key] == pytest.approx(expected[key], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"recompute": "block"}, {"compile": True}], ids=str)
@pytest.mark.parametrize("model", [CP, TR], ids=["cp", "tr"])
def test_recomputation_and_compilation_change_nothing(workers, model, change):
    case = SGD.but(tensor=2, stage=1, model=model)
    expected = workers(2).run(train, case)[0]
    actual = workers(2).run(train, case.but(model=model.model_copy(update=change)))[0]
    for key in ("losses", "norms"):
        assert actual[key] == pytest.approx(expected[key], rel=1e-5)


@pytest.mark.parametrize("experts", [[16], [16, 4]])
@everyday("size", [2, 4], keep=[4])
@pytest.mark.parametrize("factorization", ["cp", "tr", "tucker"])
def test_each_process_holds_its_share_and_5_percent(workers, factorization, size, experts):
    wide = MODEL.model_dump() | {"hidden_size": 128, "vocab_size": 1001}
    section = {"kind": "mumoe", "factorization": factorization, "num_experts": experts}
    model = GPT2Config.model_validate(wide | {"feed_forward": section | {"rank": 96}})
    total = num_parameters(model)
    for result in workers(size).run(inspect_shards, Case(tensor=size, model=model)):
        assert result["elements"] <= total * (1 / size + 0.05)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_cp_block_exchanges_its_rank_and_its_width(workers, parts):
    tokens, width, rank, experts = 10, 36, 8, 5
    away = parts - 1  # a process sends this share of `parts` of what goes round once
    gate = ("all_gather_into_tensor", experts * width * away // parts)
    narrow = tokens * rank * away // parts
    wide = ("allreduce", 2 * tokens * width * away // parts)
    for forward, backward in workers(parts).run(traffic_of_a_block, CP, parts, tokens):
        assert forward == [
            gate,
            ("all_gather_into_tensor", narrow),
            ("reduce_scatter_tensor", narrow),
            wide,
        ]
        coefficients = ("allreduce", 2 * tokens * experts * away // parts)
        assert sorted(backward) == sorted(
            [
                ("all_gather_into_tensor", narrow),
                ("reduce_scatter_tensor", narrow),
                coefficients,
                wide,
            ]
        )


@pytest.mark.parametrize("parts", [2, 4])
def test_a_ring_exchanges_its_rank_and_its_width(workers, parts):
    tokens, width, rank, ring = 10, 36, 7, 4
    away = parts - 1
    gate = ("all_gather_into_tensor", (4 + 3) * width * away // parts)
    narrow = tokens * ring * rank * away // parts
    wide = ("allreduce", 2 * tokens * width * away // parts)
    for forward, backward in workers(parts).run(traffic_of_a_block, TR, parts, tokens):
        assert forward == [
            gate,
            ("all_gather_into_tensor", narrow),
            ("reduce_scatter_tensor", narrow),
            wide,
        ]
        matrix = ("allreduce", 2 * tokens * ring * ring * away // parts)
        assert sorted(backward) == sorted(
            [
                ("all_gather_into_tensor", narrow),
                ("reduce_scatter_tensor", narrow),
                matrix,
                matrix,
                wide,
            ]
        )


@pytest.mark.parametrize("model", [CP, TR], ids=["cp", "tr"])
def test_cut_factors_see_no_future(workers, model):
    ids_BT = torch.randint(model.vocab_size, (2, 16), generator=torch.Generator().manual_seed(3))
    whole = workers(1).run(logits, model, 1, ids_BT)[0]
    parts = workers(2).run(logits, model, 2, ids_BT)
    before = torch.cat(parts, dim=-1)[..., : model.vocab_size]
    torch.testing.assert_close(before, whole, atol=1e-10, rtol=0)
    for last in (0, 7, 14):
        changed_BT = ids_BT.clone()
        changed_BT[:, last + 1 :] = (changed_BT[:, last + 1 :] + 1) % model.vocab_size
        after = torch.cat(workers(2).run(logits, model, 2, changed_BT), dim=-1)
        after = after[..., : model.vocab_size]
        seen = slice(None, last + 1)
        torch.testing.assert_close(after[:, seen], before[:, seen], atol=1e-10, rtol=0)
        assert not torch.allclose(after, before, atol=1e-10, rtol=0)


@everyday(
    ("name", "processes", "tensor", "stage"), ON_LAYOUTS, keep=[("cp", 4, 2, 1), ("tr", 2, 2, 3)]
)
def test_a_checkpoint_goes_into_a_layout_and_back_unchanged(
    workers, whole_runs, tmp_path, name, processes, tensor, stage
):
    model = MODELS[name]
    _, folder = whole_runs(Case(learning_rate=1e-3, model=model))
    there, back = tmp_path / "there", tmp_path / "back"
    case = Case(model=model, first_step=4)
    cut = case.but(tensor=tensor, stage=stage, resume=str(folder), save_to=str(there))
    workers(processes).run(resave, cut)
    path = there / "step-00000004"
    workers(1).run(resave, case.but(resume=str(path), save_to=str(back)))
    before = tensors(folder)
    for after in (tensors(path), tensors(back / "step-00000004")):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_rows_below_those_that_are_cut_go_to_the_last_part(parts):
    whole = torch.arange(18).view(9, 2)  # 8 rows and a bias
    axes = [Axis.part_and_rest(9, 8, rank, parts) for rank in range(parts)]
    places = [Placement.cut((9, 2), {0: axis}) for axis in axes]
    assert [place.shape for place in places] == [(8 // parts + 1, 2)] * parts
    padding = torch.full((1, 2), -7)
    shards = [torch.cat([rows, padding]) for rows in whole[:8].split(8 // parts)]
    shards[-1][-1] = whole[8]
    assert torch.equal(gathered(places, shards), whole)
