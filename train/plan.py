"""What a run takes on each layout: memory, traffic and FLOPs, without its machines.

Model states are exact. A micro-batch is run on shapes alone for the memory of what it computes, and
for what layers exchange.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from polyad.model.build import build_model, count_parameters, matrix_dimensions
from polyad.model.config import divisors
from polyad.model.decoder import DecoderSettings
from polyad.model.output import ModelOutput
from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel.config import Dims, LayoutError
from polyad.parallel.parallelize import split_layers
from polyad.parallel.plan import (
    Held,
    Traffic,
    allocate,
    assume_even_rows,
    flat_groups,
    model_states,
    peak_memory,
    pretended_world,
    shapes_only,
    zero_traffic,
)
from polyad.parallel.sequence import sum_gradients
from polyad.parallel.tensor import token_losses
from polyad.parallel.zero import DTYPES, StepResult, connect_without_engine
from polyad.train.config.adaptation import model_of
from polyad.train.config.distillation import open_teacher
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig
from polyad.train.errors import ConfigError
from polyad.train.loop.optimizer import build_optimizer, stacks_gates
from polyad.train.loop.step import issue_step
from polyad.train.tasks.distillation import BlockTeacher, Teacher, cross_entropy
from polyad.train.tasks.random_input import flops_of_unit, losses_for, random_batch

GROUPS = ("tensor", "expert")
"""Groups of ranks that exchange activations; all others exchange gradients, weights and sums."""
LAST = 1 - 1e-6
"""Share of a run's steps done when it takes most."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one process takes in a step."""

    states: dict[str, int]
    """Bytes between steps: `weights`, `gradients` and `optimizer`."""
    memory: dict[str, int]
    """Bytes at the peak by part, with `activations` (and logits), `buffers` and maybe `teacher`."""
    sent: dict[str, int]
    """Bytes sent in a step to `tensor`-, `expert`- and `data`-parallel ranks."""
    parameters: int
    """Weights on this process, before ZeRO divides them, with padding."""

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.memory.values())


class _ShapeEngine:
    """Stands in for `Engine` in a step on shapes: gradients vanish as soon as they are complete."""

    def __init__(self, module: nn.Module, tensor_parallel: bool, held: Held) -> None:
        self.module, self.device = module, torch.device("cpu")
        self.cross_entropy = token_losses if tensor_parallel else cross_entropy
        self.gradients: list[tuple[int, int]] = []
        self._held = held
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook: Any = parameter.register_post_accumulate_grad_hook
                hook(self._arrived)

    def _arrived(self, parameter: Tensor) -> None:
        parameter.grad = None
        self.gradients.append((self._held.restart(), parameter.numel()))

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        output: ModelOutput = self.module(*inputs, **named)
        return output

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float, refuse_above: float = inf) -> StepResult:
        return StepResult(True, 0.0)


def footprint(config: RunConfig, dims: Dims, *, on_gpu: bool = True) -> Footprint:
    """Returns what a process takes in one of a run's last steps.

    Args:
        config: Resolved configuration that fits the layout.
        dims: The layout.
        on_gpu: Whether to use the operations of a GPU.
    """
    return next(footprints(config, dims, [config.parallel.zero_stage], on_gpu=on_gpu))


def footprints(
    config: RunConfig, dims: Dims, stages: list[int], *, on_gpu: bool = True
) -> Iterator[Footprint]:
    """Yields what a process takes with each ZeRO stage; see `footprint`."""
    train, averaged = config.train, config.train.ema is not None
    micro_batches = dims.accumulation_steps(train.global_batch_size, train.micro_batch_size)
    with pretended_world(dims) as world:
        model = model_of(config)
        num_parameters = count_parameters(model)
        dimensions = matrix_dimensions(model)
        stacked = on_gpu and stacks_gates(config.optimizer)
        split_layers(model, config.parallel, world, stack_gates=stacked)
        optimizer = build_optimizer(
            config.optimizer, [(n, p, dimensions[n]) for n, p in model.named_parameters()]
        )
        flat = flat_groups(model, optimizer, dims, averaged=averaged)
        gradients, sent, teacher, batch = _micro_batch(config, dims, model, on_gpu=on_gpu)
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    for stage in stages:
        parallel = config.parallel.model_copy(update={"zero_stage": stage})
        states = model_states(flat, parallel, train.precision, buffer_bytes)
        memory = peak_memory(
            flat,
            parallel,
            train.precision,
            states=states,
            computed=gradients,
            batch=batch,
            num_parameters=num_parameters,
            accumulates=micro_batches > 1,
            temporaries=0 if on_gpu and isinstance(optimizer, torch.optim.AdamW) else 2,
        )
        if teacher:
            memory["teacher"] = teacher
        others = {"data": zero_traffic(flat, stage, train.precision, micro_batches)}
        yield Footprint(
            states=states,
            memory=memory,
            sent={key: micro_batches * sent.get(key, 0) for key in GROUPS} | others,
            parameters=sum(each.total for each in flat),
        )


def _micro_batch(
    config: RunConfig, dims: Dims, model: nn.Module, *, on_gpu: bool
) -> tuple[list[tuple[int, int]], dict[str, int], int, int]:
    """Runs a micro-batch of a split model; its parameters are allocated.

    Returns:
        What it takes, whatever the ZeRO stage: the bytes held when each gradient arrives, with its
        elements; the bytes sent by group; the bytes of the teacher, and of the batch.
    """
    train, held, traffic = config.train, Held(), Traffic(dims)
    experts = [layer for layer in model.modules() if isinstance(layer, SelectingMoE)]
    if dims.expert_parallel_size > 1:
        connect_without_engine(experts, dims.tensor_parallel_size)
    assume_even_rows(model)
    batch = random_batch(config.model, range(train.micro_batch_size), config.data)
    with shapes_only(held, traffic, on_gpu=on_gpu, compiled=config.model.compile):
        allocate(model, DTYPES[train.precision])
        if config.parallel.sequence_parallel:
            sum_gradients(model)
        before = held.now
        teacher = _teacher(config)
        teacher_bytes = held.now - before
        if isinstance(teacher, BlockTeacher):
            teacher.attach_to(model)
        engine: Any = _ShapeEngine(model.train(), dims.tensor_parallel_size > 1, held)
        grows = getattr(config.model.known_feed_forward(), "final_top_k", None) is not None
        for _ in range(2 if grows else 1):
            traffic.sent.clear()
            engine.gradients.clear()
            held.restart()
            base = held.now
            issue_step(
                engine,
                losses_for(config.model, teacher),
                iter([tree_map(torch.empty_like, batch)]),
                1,
                1e-3,
                losses=config.loss,
                progress=LAST,
            )
            engine.gradients.append((held.restart(), 0))
    gradients = [(most - base, elements) for most, elements in engine.gradients]
    batch_bytes = sum(part.nbytes for part in tree_leaves(batch) if isinstance(part, Tensor))
    return gradients, dict(traffic.sent), teacher_bytes, batch_bytes


def _teacher(config: RunConfig) -> Teacher | BlockTeacher | None:
    """The run's teacher, or teaching feed-forwards, whole on each process, without values."""
    if config.distill.teacher is None:
        return None
    dtype, loss = DTYPES[config.train.precision], config.distill.blocks
    if loss is None:
        settings = open_teacher(Path(config.distill.teacher)).model_config()
    else:  # the shapes of its feed-forwards are known without it
        assert isinstance(config.model, DecoderSettings)
        settings, replaced = config.model.original(), config.model.replaced_blocks()
    with unset_fake_temporarily():
        model = build_model(settings).requires_grad_(False).eval()
    if loss is None:
        allocate(model, dtype)
        return Teacher(model, config.distill)
    layers: dict[int, Any] = {
        block: model.get_submodule(f"blocks.{block}.feed_forward") for block in replaced
    }
    for layer in layers.values():
        allocate(layer, dtype)
    return BlockTeacher(layers, loss)


def layouts(config: RunConfig, processes: int) -> Iterator[tuple[RunConfig, Footprint]]:
    """Yields every valid layout of a run on a number of processes, and what it takes.

    The global batch, the micro-batch and the other keys are those of the configuration.
    """
    sizes = divisors(processes)
    for tensor, expert, sequence in product(sizes, sizes, (False, True)):
        valid = {}
        for stage in (1, 2, 3) if processes > 1 else (1,):
            parallel = config.parallel.model_copy(
                update={
                    "tensor_parallel_size": tensor,
                    "expert_parallel_size": expert,
                    "sequence_parallel": sequence,
                    "zero_stage": stage,
                }
            )
            other = config.model_copy(update={"parallel": parallel})
            with suppress(ConfigError, LayoutError):
                dims = validate(other, processes)
                valid[stage] = other
        if valid:
            planned = footprints(next(iter(valid.values())), dims, [*valid])
            yield from zip(valid.values(), planned, strict=True)


def flops_per_step(config: RunConfig) -> int:
    """Model FLOPs of a step of all processes; recomputation does not count."""
    units = config.train.global_batch_size * config.model.units_per_sample()
    return flops_of_unit(config.model, config.data) * units
