"""Turns a model on the meta device into an engine over all ranks, step by step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from polyad.model.build import (
    compile_model,
    count_parameters,
    initial_value,
    matrix_dimensions,
    place,
)
from polyad.model.cuda_graph import GraphedBlocks
from polyad.model.decoder import Decoder
from polyad.model.lora import of_base
from polyad.model.mumoe.gating import BatchNorm
from polyad.model.mumoe.layer import MuMoE
from polyad.model.mxd import SparseTable
from polyad.model.smoe.graph import AttentionGraph
from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel import comm, expert, zero
from polyad.parallel.config import ParallelConfig
from polyad.parallel.fragments import fill, name_parts
from polyad.parallel.regions import data_group
from polyad.parallel.sequence import Tokens, cut_sequence, sum_gradients
from polyad.parallel.source import Source
from polyad.parallel.tensor import (
    cut_adapters,
    cut_vocabulary,
    pad_ranks,
    parallelize_factors,
    parallelize_table,
    parallelize_tensors,
    token_losses,
)

# (parameter name, parameter, number of dimensions as in `matrix_dimensions`)
NamedParameters = list[tuple[str, nn.Parameter, int]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]


def parallelize(
    model: nn.Module,
    parallel: ParallelConfig,
    *,
    world: comm.World,
    make_optimizer: OptimizerFactory,
    precision: zero.Precision,
    global_batch_size: int,
    micro_batch_size: int,
    clip_grad_norm: float,
    source: Source,
    cross_entropy: zero.CrossEntropy,
    compiled: bool = False,
    cuda_graph: bool = False,
    average_decay: float | None = None,
    stack_gates: bool = False,
) -> zero.Engine:
    """Distributes a model over all ranks.

    Args:
        model: the model on the meta device, from `build_model`, possibly with adapters; parameters
            without `requires_grad` are frozen.
        parallel: the ZeRO stage and its buffers.
        world: this rank.
        make_optimizer: returns the optimizer for those of the named parameters that require a
            gradient.
        precision: precision of weights and activations in forward and backward; masters are fp32.
        global_batch_size: samples per optimizer step, over all ranks.
        micro_batch_size: samples per forward pass of one rank.
        clip_grad_norm: maximum gradient norm; 0 for no clipping.
        source: initial weights and optimizer state.
        cross_entropy: the loss for full logits; a layout that splits the vocabulary has its own.
        compiled: whether blocks run through torch.compile.
        cuda_graph: whether a GPU replays blocks as CUDA graphs.
        average_decay: decay of the moving average of the weights; None for no average.
        stack_gates: see `split_layers`.

    Returns:
        The engine, ready for its first step.
    """
    config = zero.deepspeed_config(
        parallel,
        precision=precision,
        micro_batch_size=micro_batch_size,
        accumulation_steps=world.accumulation_steps(global_batch_size, micro_batch_size),
        clip_grad_norm=clip_grad_norm,
        num_parameters=count_parameters(model),
    )
    left_out = of_base(model)
    # The order matters. Layers are split on the meta device; storage exists before the optimizer
    # sees it; blocks are compiled before the engine hooks them; values come last, because building
    # a bf16 engine rounds them.
    mpu = None
    dimensions = matrix_dimensions(model)
    tokens = split_layers(model, parallel, world, stack_gates=stack_gates)
    if world.tensor_parallel_size > 1:
        mpu, cross_entropy = comm.deepspeed_mpu(), token_losses
    _allocate(model, world, zero.DTYPES[precision], config, mpu)
    if parallel.zero_stage == 3:
        _gather_what_others_read(model)
    if tokens is not None:
        sum_gradients(model)
    if compiled:
        # DeepSpeed later concatenates them into one flat tensor.
        flat = [p for p in model.parameters() if p.requires_grad and parallel.zero_stage < 3]
        compile_model(model, placed_anywhere=any(p.numel() * p.element_size() % 16 for p in flat))
    if cuda_graph and world.device.type == "cuda":
        blocks = model.get_submodule("blocks")
        blocks.graphs = GraphedBlocks(blocks.children())  # type: ignore[assignment]
    named = [(name, p, dimensions[name]) for name, p in model.named_parameters()]
    optimizer = make_optimizer(named)
    if world.expert_parallel_size > 1:
        zero.split_expert_groups(optimizer)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    engine = zero.Engine(
        model,
        optimizer,
        config,
        world=world,
        cross_entropy=cross_entropy,
        mpu=mpu,
        average_decay=average_decay,
        left_out=left_out,
    )
    if parallel.zero_stage < 3:
        name_parts(engine, groups)
    comm.limit_waiting(parallel.timeout_minutes)
    fill(engine, source)
    return engine


def split_layers(
    model: nn.Module, parallel: ParallelConfig, world: comm.World, *, stack_gates: bool = False
) -> Tokens | None:
    """Gives each layer of a model on the meta device this rank's part, in place.

    Args:
        model: the model.
        parallel: whether tokens are split.
        world: this rank.
        stack_gates: whether the gate and the first layer of sparse experts become one parameter,
            which the optimizer must treat as one; checkpoints have both.

    Returns:
        How tokens are split; None without sequence parallelism.
    """
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    tokens = Tokens(world) if parallel.sequence_parallel else None
    cut_vocabulary(model, world, tokens)
    if world.tensor_parallel_size > 1:
        parallelize_tensors(model, world, tokens)
        for module in model.modules():
            if isinstance(module, MuMoE):
                parallelize_factors(module, world)
            elif isinstance(module, SparseTable):
                parallelize_table(module, world)
    else:
        pad_ranks(model)
    synchronize_norms(model, world)
    routed = [module for module in model.modules() if isinstance(module, SelectingMoE)]
    if routed:
        zero.forget_expert_groups(world.tensor_parallel_size)
    for layer in routed:
        expert.parallelize_experts(layer, world, stack_gates=stack_gates)
    cut_adapters(model, world)
    if tokens is not None:
        assert isinstance(model, Decoder)
        cut_sequence(model, tokens, world)
    for name, parameter in model.named_parameters():  # split layers have new parameters
        parameter.requires_grad_(name in trained)
    return tokens


def synchronize_norms(model: nn.Module, world: comm.World) -> None:
    """Makes every BatchNorm of a model normalize over all data-parallel ranks, in place.

    Args:
        model: the model on the meta device.
        world: this rank.
    """
    if world.data_parallel_size > 1:
        group = data_group(world)
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.mean = group.mean


def _gather_what_others_read(model: nn.Module) -> None:
    """Makes ZeRO 3 gather parameters that are read outside of the module that owns them."""
    for block in model.modules():
        layer = getattr(block, "feed_forward", None)
        if isinstance(layer, SelectingMoE):
            zero.gather_with(layer, layer.experts)  # scores read them
            if isinstance(layer.router.graph, AttentionGraph):
                zero.gather_with(block, block.get_submodule("attention.projection"))


def _allocate(
    model: nn.Module, world: comm.World, dtype: torch.dtype, config: dict, mpu: Any
) -> None:
    """Allocates parameters one at a time; in stage 3 only this rank's part of each is kept."""
    placed = None
    if config["zero_optimization"]["stage"] == 3:
        placed = zero.partitioner(config, dtype, mpu)

    named = list(model.named_parameters())
    zeros = ((name, torch.zeros(p.shape, dtype=dtype, device=world.device)) for name, p in named)
    place(model, zeros, world.device, dtype, placed)
    buffers = [name for name, _ in model.named_buffers()]
    place(model, ((name, initial_value(model, name, 0)) for name in buffers), world.device)
