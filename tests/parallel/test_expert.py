"""Experts over processes compute what one process computes."""

import pytest

from polyad.model.build import build_model
from polyad.model.lora import LoRAConfig, add_lora
from polyad.parallel.config import Dims, ParallelConfig
from polyad.parallel.parallelize import split_layers
from polyad.parallel.plan import pretended_world
from tests.helpers.everyday import everyday
from tests.helpers.experts import PATTERNS, dispatch_against_one_process, drops_of_experts
from tests.helpers.parity import assert_near_state, assert_same_course, near
from tests.helpers.small_decoders import small_decoder
from tests.helpers.training import Case, moe_model, train, train_one_expert

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("parts", "processes"), [(2, 2), (4, 4)])
def test_any_load_gives_what_one_process_gives(workers, parts, processes, pattern):
    for bias in (True, False):
        config = moe_model().model_copy(update={"bias": bias})
        results = workers(processes).run(dispatch_against_one_process, config, parts, pattern)
        assert all(max(result.values()) < 1e-5 for result in results)


@pytest.mark.parametrize(
    ("frozen", "lora", "shape"),
    [
        ((), None, (2, 36, 2, 12)),
        (("gate",), None, (2, 36, 12)),
        (("gate", "up"), None, (2, 36, 12)),
        ((), LoRAConfig(rank=2, experts=True, trained=("experts.*",)), (2, 36, 12)),
    ],
)
def test_trained_gates_without_adapters_are_stacked(frozen, lora, shape):
    dims = Dims(world_size=4, tensor_parallel_size=2, expert_parallel_size=2)
    model = build_model(small_decoder("norm over heads"))
    experts = model.blocks[1].feed_forward.experts
    for name in frozen:
        experts.get_parameter(name).requires_grad_(False)
    if lora is not None:
        add_lora(model, lora)
    with pretended_world(dims) as world:
        split_layers(model, ParallelConfig(), world, stack_gates=True)
    experts = model.blocks[1].feed_forward.experts
    assert experts.up.shape == shape
    assert (experts.gate is None) == (len(shape) == 4)
    assert experts.up.requires_grad == ("up" not in frozen)


@everyday("stage", [1, 3], keep=[3])
def test_processes_whose_experts_get_no_row_keep_in_step(workers, tmp_path, stage):
    case = Case(optimizer="sgd", learning_rate=0.1, clip=0.5, model=moe_model(top_k=1))
    expected = workers(1).run(train_one_expert, case.but(save_to=str(tmp_path / "one")))[0]
    loads = [record["routing/blocks.0.feed_forward/load"] for record in expected["routing"]]
    assert loads == [[1.0, 0.0, 0.0, 0.0]] * 4
    case = case.but(stage=stage, expert=2, save_to=str(tmp_path))
    for result in workers(4).run(train_one_expert, case):
        assert_same_course(result, expected)
    assert_near_state(tmp_path / "step-00000004", tmp_path / "one" / "step-00000004")


# Noise and dropout


@pytest.mark.slow
def test_tensor_parallel_processes_drop_other_inner_units_and_go_on_alike(workers):
    case = Case(tensor=2, model=moe_model(expert_dropout=0.5))
    first, second = workers(2).run(drops_of_experts, case)
    assert first["inner"] != second["inner"]
    assert 0.4 < first["inner"].count(0.0) / 1000 < 0.6
    assert first["after"] == second["after"]
    noisy = moe_model(expert_dropout=0.5, router_noise=1.0)
    recomputing = noisy.model_copy(update={"recompute": "block"})
    plain, again = (
        workers(2).run(train, case.but(model=model, stage=1, last_step=2))
        for model in (noisy, recomputing)
    )
    for results in (plain, again):
        assert results[0] == results[1]
    assert near(again[0]["losses"], plain[0]["losses"])
    assert near(again[0]["norms"], plain[0]["norms"])


def test_spread_experts_drop_units_in_bf16_too(workers):
    model = moe_model(expert_dropout=0.5, router_noise=1.0)
    case = Case(expert=2, stage=2, precision="bf16", last_step=2, model=model)
    results = workers(2).run(train, case)
    assert results[0] == results[1]
    assert results[0]["applied"] == [True, True]
