"""The model of a run, with its adapters, and untrained parameters frozen; its engine."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polyad.model.build import build_model, count_parameters
from polyad.model.decoder import DecoderSettings
from polyad.model.lora import add_lora, of_base
from polyad.model.mxd import SparseTable
from polyad.model.settings import ModelSettings
from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel import comm
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.parallelize import parallelize
from polyad.parallel.source import InitialWeights, Joined, Source, WeightsOnly
from polyad.parallel.weights import Weights
from polyad.parallel.zero import Engine
from polyad.train.config.run import RunConfig
from polyad.train.loop.optimizer import OptimizerConfig, build_optimizer, freeze, stacks_gates
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.random_input import RandomBatch, random_batch
from polyad.train.tasks.task import Task

GRAPH = ".router.graph."
"""Name part of parameters and buffers of a token graph."""
OF_STEPS = (f"{GRAPH}started", ".router.selection.num_selected")
"""Name suffixes of buffers that depend on a run's step: whether a graph is on, and
the number of selected experts."""


def model_of(config: RunConfig) -> nn.Module:
    """Builds the model of a run on the meta device.

    Args:
        config: the run's configuration, completed with the values that the data determines.

    Raises:
        ValueError: with an `exit_status` of 2: a pattern of adapters or groups matches nothing.
    """
    model = build_model(config.model)
    if config.adapt.lora is not None:
        add_lora(model, config.adapt.lora)
    if config.distill.blocks is not None:
        trained = replaced_names(config.model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
    freeze(model, config.optimizer)
    return model


def replaced_names(model: ModelSettings, there: ModelSettings | None = None) -> tuple[str, ...]:
    """Returns name prefixes of the parameters of replaced feed-forwards.

    Args:
        model: their model.
        there: another model, whose replaced blocks are left out; None: all are returned.
    """
    ours, theirs = (
        set(each.replaced_blocks()) if isinstance(each, DecoderSettings) else set[int]()
        for each in (model, there)
    )
    return tuple(f"blocks.{block}.feed_forward." for block in sorted(ours - theirs))


def unused_parameters(model: nn.Module) -> int:
    """Counts the parameters of experts that a token does not use at the end of a run, including
    output biases; for a sparse gate's table the rows beyond top_k."""
    unused = 0
    for module in model.modules():
        if isinstance(module, SelectingMoE):
            config, sizes = module.config, map(torch.numel, module.parameters_by_expert())
            count, used = config.num_experts, config.known_final_top_k()
            unused += sum(sizes) * (count - used) // count
        elif isinstance(module, SparseTable):
            unused += module.table[0].numel() * (len(module.table) - module.config.top_k)
    return unused


def reinitialized_prefixes(task: Task[Any], weights: Weights, config: RunConfig) -> tuple[str, ...]:
    """Returns name prefixes of what is initialized from the seed, not from weights.

    Args:
        task: the run's task.
        weights: the weights from which it starts.
        config: the run's configuration.

    Returns:
        Prefixes from the task, of feed-forwards in blocks that this run replaces, of new statistics
        of token graphs, and of buffers that depend on the step. With distill.blocks only the
        replaced feed-forwards.
    """
    model = config.model
    replaced = replaced_names(model, weights.model_config())
    if config.distill.blocks is not None:
        return replaced
    new, _ = graph_statistics(weights, model)
    begins = {name for name, _ in persistent_buffers(build_model(model)) if name.endswith(OF_STEPS)}
    others = {name for name in {*new, *begins} if not name.startswith(replaced or ("/",))}
    return (*task.reinitialized_prefixes(weights), *replaced, *sorted(others))


def graph_statistics(
    weights: Weights, model: ModelSettings
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Finds running statistics of token graphs that only the run has, or only the weights.

    Returns:
        Name prefixes of both.
    """
    theirs, ours = (
        {name for name, _ in persistent_buffers(build_model(config)) if GRAPH in name}
        for config in (weights.model_config(), model)
    )
    return tuple(sorted(ours - theirs)), tuple(sorted(theirs - ours))


def source_of(
    config: RunConfig, resume: Checkpoint | None, init: Weights | None, anew: tuple[str, ...]
) -> Source:
    """Returns the source of a run's initial weights, moments and buffers.

    Args:
        config: the run's configuration.
        resume: the checkpoint from which it continues.
        init: the weights of checkpoint.init_from, for a new run or one with adapters.
        anew: name prefixes that these lack, and that are initialized from the seed.
    """
    model = model_of(config)
    start: Source | None = WeightsOnly(init) if isinstance(init, Checkpoint) else init
    plain_model = build_model(config.model)
    if start is not None and anew:
        weights, fresh = start, InitialWeights(plain_model, config.seed)
        start = Joined(lambda name: fresh if name.startswith(anew) else weights)
    if config.adapt.lora is None:
        return resume or start or InitialWeights(model, config.seed)
    assert start is not None
    base, own, of_start = start, resume or InitialWeights(model, config.seed), of_base(model)
    if resume is None:
        of_start = frozenset(
            name for name, _ in (*plain_model.named_parameters(), *model.named_buffers())
        )
    return Joined(lambda name: base if name in of_start else own)


def engine_of(
    config: RunConfig,
    world: comm.World,
    source: Source,
    *,
    optimizer: OptimizerConfig | None = None,
) -> Engine:
    """Builds the engine of a configuration.

    Args:
        config: Resolved configuration that fits the layout.
        world: This process.
        source: Source of the initial weights, and of moments if it has them.
        optimizer: Replaces the configuration's.
    """
    train, chosen = config.train, optimizer or config.optimizer
    engine = parallelize(
        model_of(config),
        config.parallel,
        world=world,
        make_optimizer=functools.partial(build_optimizer, chosen),
        precision=train.precision,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        clip_grad_norm=chosen.clip_grad_norm,
        source=source,
        cross_entropy=cross_entropy,
        compiled=config.model.compile,
        cuda_graph=train.cuda_graph,
        average_decay=train.ema,
        stack_gates=world.device.type == "cuda" and stacks_gates(chosen),
    )
    engine.train()
    return engine


def random_micro_batches(config: RunConfig, world: comm.World, step: int) -> Iterator[RandomBatch]:
    """Yields this process's random micro-batches of a step; all together are equal on any layout.

    Args:
        config: resolved configuration.
        world: this process.
        step: the step's number, which is the seed.
    """
    size, ranks = config.train.micro_batch_size, world.data_parallel_size
    for number in range(config.train.global_batch_size // size)[world.data_parallel_rank :: ranks]:
        first = 1_000_000 * step + number * size
        yield random_batch(config.model, range(first, first + size), config.data)


def trained_parameters(model: nn.Module) -> int:
    """Counts the parameters that are trained, with those of adapters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def trained_line(model: nn.Module) -> str:
    """Says how many parameters are trained; empty if none is frozen."""
    trained = trained_parameters(model)
    frozen = count_parameters(model) - trained
    return f"trains {trained:,} parameters; {frozen:,} are frozen" if frozen else ""
