"""Factorized experts over processes: blocks, ranks rounded up, BatchNorm of gates."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from polyad.model.build import build_model, place
from polyad.model.decoder import Decoder, GPT2Config
from polyad.model.mumoe.config import MuMoEConfig
from polyad.parallel import comm, tensor
from polyad.parallel.checkpoint.format import MASTER, Box
from polyad.parallel.parallelize import synchronize_norms
from polyad.parallel.shard import Placement, placement_of
from polyad.parallel.source import InitialWeights
from polyad.parallel.tensor import cut_vocabulary, parallelize_factors, parallelize_tensors
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_same_course
from tests.helpers.training import MODEL, Case, build_engine, mumoe_model, take_step, train

pytestmark = pytest.mark.distributed


def cut_model(config: GPT2Config, parts: int, *, synchronized: bool = False) -> Decoder:
    """A model with random weights in float64 over tensor-parallel processes, without an engine.

    Args:
        config: of the model.
        parts: processes.
        synchronized: BatchNorm over all data-parallel processes.
    """
    world = comm.initialize(tensor_parallel_size=parts)
    model = build_model(config)
    if parts > 1:
        cut_vocabulary(model, world, None)
        parallelize_tensors(model, world, None)
        for block in model.blocks:
            parallelize_factors(block.feed_forward, world)
    if synchronized:
        synchronize_norms(model, world)

    place_shards(model, config, torch.float64, randomized=True)  # a gate starts at zero
    return model


def place_shards(
    model: Decoder, config: GPT2Config, dtype: torch.dtype, *, randomized: bool = False
) -> None:
    """Fills a model whose parameters are cut with its part of initial or of random weights."""
    source = InitialWeights(build_model(config), 7)

    def values() -> Any:
        for name, parameter in model.named_parameters():
            where = placement_of(parameter)
            shape = where.global_shape
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
            if not randomized:
                whole = source.read(Box(name, MASTER, shape, (0,) * len(shape), shape))
            yield name, shard_of(where, whole)
        for name, _ in model.named_buffers():
            yield name, source.buffer(name)

    place(model, values(), "cpu", dtype)


def block_against_the_whole(config: GPT2Config, parts: int, tokens: int) -> dict[str, float]:
    """Largest differences of a block's output and gradients from those of an unsharded one."""
    generator = torch.Generator().manual_seed(5)
    shape = (1, tokens, config.hidden_size)
    z_BTD, u_BTD, wanted_BTD = torch.randn(3, *shape, dtype=torch.float64, generator=generator)
    found = []
    for size in (parts, 1):
        layer = cut_model(config, size).blocks[0].feed_forward
        inputs = [x_BTD.clone().requires_grad_() for x_BTD in (z_BTD, u_BTD)]
        y_BTD, _ = layer(*inputs)
        (y_BTD * wanted_BTD).sum().backward()
        about = {"y": y_BTD.detach(), "z": inputs[0].grad, "u": inputs[1].grad}
        found.append((about | {name: p.grad for name, p in layer.named_parameters()}, layer))
    (ours, cut), (theirs, _) = found
    for name, parameter in cut.named_parameters():
        where = placement_of(parameter)
        (run,) = where.axes[0].runs
        assert ours[name][run.length :].eq(0).all()  # padding
        theirs[name] = shard_of(where, theirs[name])
    return {
        name: ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item()
        for name in theirs
        if theirs[name] is not None  # a gate of the normalized input reads no other
    }


def batch_norm_against_the_whole(
    config: GPT2Config, parts: int, tokens: int, more: int = 0
) -> dict[str, float]:
    """Largest differences of a block's outputs, gradients and statistics over all processes from
    those of one process with all tokens.

    Args:
        config: of a model whose gates have a BatchNorm.
        parts: tensor-parallel processes; the others are data-parallel.
        tokens: of the first data-parallel process.
        more: tokens that each has more than the one before, as with padding.
    """
    generator = torch.Generator().manual_seed(5)
    world = comm.initialize(tensor_parallel_size=parts)
    counts = [tokens + more * rank for rank in range(world.data_parallel_size)]
    shape = (1, sum(counts), config.hidden_size)
    z_BTD, u_BTD, wanted_BTD = torch.randn(3, *shape, dtype=torch.float64, generator=generator)
    # Each process has a different mean.
    u_BTD += torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).view(1, -1, 1)
    first = sum(counts[: world.data_parallel_rank])
    own = slice(first, first + counts[world.data_parallel_rank])
    found = []
    for rows in (own, slice(None)):
        is_whole = rows == slice(None)
        layer = cut_model(config, parts, synchronized=not is_whole)
        block = layer.blocks[0].feed_forward
        inputs = [x_BTD[:, rows].clone().requires_grad_() for x_BTD in (z_BTD, u_BTD)]
        y_BTD, stats = block(*inputs)
        # The loss of all is the mean over processes.
        scale = world.data_parallel_size if is_whole else 1
        ((y_BTD * wanted_BTD[:, rows]).sum() / scale).backward()
        gradients = {name: p.grad for name, p in block.named_parameters()}
        about = {name: stats.measures[name] for name in ("score_mean_S", "score_square_S")}
        if not is_whole:  # as an engine and the loop do
            weight = counts[world.data_parallel_rank] * len(counts) / sum(counts)
            gradients = {name: _mean(gradient, world) for name, gradient in gradients.items()}
            about = {name: _mean(weight * value, world) for name, value in about.items()}
        mine = own if is_whole else slice(None)
        about |= {n: x.grad[:, mine] * scale for n, x in zip("zu", inputs, strict=True)}
        found.append(about | gradients | {"y": y_BTD.detach()[:, mine]})
    ours, theirs = found
    return {
        name: ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item()
        for name in theirs
    }


def _mean(value: torch.Tensor, world: comm.World) -> torch.Tensor:
    """Over data-parallel processes; all tensor-parallel ones of a part have equal values."""
    everyone = [torch.empty_like(value) for _ in range(world.size)]
    dist.all_gather(everyone, value.contiguous())
    mine = everyone[world.tensor_parallel_rank :: world.tensor_parallel_size]
    return torch.stack(mine).mean(0)


def padding_after_training(case: Case) -> dict[str, tuple[tuple[int, ...], float]]:
    """The shape of each factor with a padded rank, and the largest number in its padding, after
    some steps."""
    engine, world = build_engine(case)
    for step in range(3):
        assert take_step(engine, world, case, step).result.applied
    found = {}
    for name, parameter in engine.module.named_parameters():
        where = placement_of(parameter)
        if ".feed_forward." in name and where.shape != where.global_shape:
            padding = parameter.detach().clone()
            padding[tuple(slice(0, size) for size in where.global_shape)] = 0
            found[name] = where.shape, padding.abs().max().item()
    return found


def train_as_it_is(case: Case) -> dict[str, Any]:
    """Like `train`, with ranks that are not rounded up."""
    with mock.patch.object(tensor, "RANKS", 1):
        return train(case)


def shard_of(placement: Placement, whole: torch.Tensor) -> torch.Tensor:
    """Cuts a shard out of a global tensor; padding is 0."""
    part = whole.new_zeros(placement.shape)
    for box, view in placement.views("", "", part.view(-1), 0):
        view.copy_(whole[box.slices])
    return part


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


@everyday("parts", [2, 4], keep=[2])
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
