"""Expert parallelism examined from inside; called in worker processes."""

import torch
import torch.distributed as dist

from polyad.model.build import build_model
from polyad.model.decoder import Decoder, GPT2Config
from polyad.model.smoe.layer import Dispatcher, SparseMoE
from polyad.model.smoe.router import Selected
from polyad.parallel import comm, expert, zero
from tests.helpers.factors import place_shards
from tests.helpers.training import Case, build_engine


def expert_parallel_model(
    config: GPT2Config, expert_parallel_size: int, dtype: torch.dtype
) -> tuple[Decoder, comm.World]:
    """A model with distributed experts, in any precision and without an engine."""
    world = comm.initialize(expert_parallel_size=expert_parallel_size)
    model = build_model(config)
    assert isinstance(model, Decoder)
    layers = [layer for layer in model.modules() if isinstance(layer, SparseMoE)]
    for layer in layers:
        expert.parallelize_experts(layer, world)
    if expert_parallel_size > 1:
        zero.connect_without_engine(layers)

    place_shards(model, config, dtype)
    return model, world


def drops_of_experts(case: Case) -> dict[str, list[float]]:
    """Dropout inside experts applied to ones, and the next random numbers."""
    engine, world = build_engine(case)
    comm.seed_random(5, 0, world)
    inner = engine.module.blocks[0].feed_forward.experts.dropout(torch.ones(1000))
    return {"inner": inner.tolist(), "after": torch.rand(3).tolist()}


PATTERNS = ("random", "all to the first expert", "none to the last process", "one token", "uneven")


def dispatch_against_one_process(
    config: GPT2Config, expert_parallel_size: int, pattern: str
) -> dict[str, float]:
    """Largest differences of outputs and gradients from those of all experts in one process.

    The loss is the sum over processes, so an expert's gradient is that of all tokens together.
    """
    model, world = expert_parallel_model(config, expert_parallel_size, torch.float32)
    layer = model.blocks[0].feed_forward
    total, top_k = config.feed_forward.num_experts, config.feed_forward.top_k
    width = config.hidden_size
    generator = torch.Generator().manual_seed(world.rank)
    count = {"one token": 1, "uneven": 5 + 9 * world.rank}.get(pattern, 12)
    if pattern == "all to the first expert":
        ids_NK = torch.stack([torch.zeros(count), torch.ones(count)], 1).long()[:, :top_k]
    else:
        last = total - total // expert_parallel_size
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
    whole, _ = expert_parallel_model(config, 1, torch.float32)
    reference = whole.blocks[0].feed_forward
    y_ND, *_ = Dispatcher()(tokens_ND, selected, reference.experts)
    (y_ND * wanted_ND).sum().backward()
    theirs = {"y": y_ND.detach(), "tokens": tokens_ND.grad, "weights": weights_NK.grad}
    size = total // expert_parallel_size
    here = slice(world.expert_parallel_rank * size, (world.expert_parallel_rank + 1) * size)
    for name, parameter in reference.experts.named_parameters():
        gradient = parameter.grad.clone()
        # Processes with the same experts keep their own tokens' gradients until ZeRO adds them.
        group = [r for r in range(world.size) if _set_of(r, world) == _set_of(world.rank, world)]
        gathered = [torch.empty_like(gradient) for _ in range(world.size)]
        dist.all_gather(gathered, gradient)
        theirs[name] = sum(gathered[r] for r in group)[here]
    return {name: (ours[name] - theirs[name]).abs().max().item() for name in ours}


def _set_of(rank: int, world: comm.World) -> int:
    """Which group of expert-parallel processes a rank is in."""
    return rank // world.expert_parallel_size
