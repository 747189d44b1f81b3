"""Experts over processes compute what one process computes."""

import pytest
import torch
import torch.distributed as dist

from polyad.model.build import build_model
from polyad.model.decoder import Decoder, GPT2Config
from polyad.model.lora import LoRAConfig, add_lora
from polyad.model.smoe.layer import Dispatcher, SparseMoE
from polyad.model.smoe.router import Selected
from polyad.parallel import comm, expert, zero
from polyad.parallel.config import Dims, ParallelConfig
from polyad.parallel.parallelize import split_layers
from polyad.parallel.plan import pretended_world
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_near_state, assert_same_course, near
from tests.helpers.small_decoders import small_decoder
from tests.helpers.training import Case, build_engine, moe_model, train, train_one_expert
from tests.parallel.test_mumoe import place_shards

pytestmark = pytest.mark.distributed


def expert_parallel_model(config: GPT2Config, parts: int) -> tuple[Decoder, comm.World]:
    """A model with distributed experts, without an engine."""
    world = comm.initialize(expert_parallel_size=parts)
    model = build_model(config)
    layers = [layer for layer in model.modules() if isinstance(layer, SparseMoE)]
    for layer in layers:
        expert.parallelize_experts(layer, world)
    if parts > 1:
        zero.connect_without_engine(layers)

    place_shards(model, config, torch.float32)
    return model, world


def drops_of_experts(case: Case) -> dict[str, list[float]]:
    """Dropout inside experts applied to ones, and the next random numbers."""
    engine, world = build_engine(case)
    comm.seed_random(5, 0, world)
    inner = engine.module.blocks[0].feed_forward.experts.dropout(torch.ones(1000))
    return {"inner": inner.tolist(), "after": torch.rand(3).tolist()}


PATTERNS = ("random", "all to the first expert", "none to the last process", "one token", "uneven")


def dispatch_against_one_process(config: GPT2Config, parts: int, pattern: str) -> dict[str, float]:
    """Largest differences of outputs and gradients from those of all experts in one process.

    The loss is the sum over processes, so an expert's gradient is that of all tokens together.
    """
    model, world = expert_parallel_model(config, parts)
    layer = model.blocks[0].feed_forward
    total, top_k = config.feed_forward.num_experts, config.feed_forward.top_k
    width = config.hidden_size
    generator = torch.Generator().manual_seed(world.rank)
    count = {"one token": 1, "uneven": 5 + 9 * world.rank}.get(pattern, 12)
    if pattern == "all to the first expert":
        ids_NK = torch.stack([torch.zeros(count), torch.ones(count)], 1).long()[:, :top_k]
    else:
        last = total - total // parts
        limit = last if pattern == "none to the last process" else total
        scores = torch.rand(count, limit, generator=generator)
        ids_NK = scores.topk(top_k).indices
    weights_NK = torch.rand(count, top_k, generator=generator).requires_grad_()
    tokens_ND = torch.randn(count, width, generator=generator).requires_grad_()
    wanted_ND = torch.randn(count, width, generator=generator)
    selected = Selected.of(weights_NK, ids_NK, total)
    parameters = dict(layer.experts.named_parameters())
    y_ND, *_ = layer.dispatcher(tokens_ND, selected, layer.experts)
    (y_ND * wanted_ND).sum().backward()
    ours = {"y": y_ND.detach(), "tokens": tokens_ND.grad, "weights": weights_NK.grad}
    ours |= {name: p.grad for name, p in parameters.items()}

    tokens_ND.grad = weights_NK.grad = None
    whole, _ = expert_parallel_model(config, 1)
    reference = whole.blocks[0].feed_forward
    y_ND, *_ = Dispatcher()(tokens_ND, selected, reference.experts)
    (y_ND * wanted_ND).sum().backward()
    theirs = {"y": y_ND.detach(), "tokens": tokens_ND.grad, "weights": weights_NK.grad}
    size = total // parts
    here = slice(world.expert_parallel_rank * size, (world.expert_parallel_rank + 1) * size)
    for name, parameter in reference.experts.named_parameters():
        gradient = parameter.grad.clone()
        # Processes with the same experts keep their own tokens' gradients until ZeRO adds them.
        group = [r for r in range(world.size) if r // parts == world.rank // parts]
        gathered = [torch.empty_like(gradient) for _ in range(world.size)]
        dist.all_gather(gathered, gradient)
        theirs[name] = sum(gathered[r] for r in group)[here]
    return {name: (ours[name] - theirs[name]).abs().max().item() for name in ours}


@pytest.mark.parametrize("pattern", PATTERNS)
@everyday(("parts", "processes"), [(2, 2), (4, 4)], keep=[(2, 2)])
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
