"""Real steps with their communication and memory; called in worker processes."""

from pathlib import Path
from typing import Any

import torch

from polyad.parallel import comm
from polyad.parallel.checkpoint.manage import Retention
from polyad.parallel.checkpoint.save import Saver
from polyad.parallel.config import Dims
from polyad.parallel.plan import Traffic, tensors_in
from polyad.parallel.source import InitialWeights
from polyad.parallel.zero import Engine
from polyad.train.config.adaptation import engine_of, model_of, random_micro_batches
from polyad.train.config.distillation import load_teacher
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig
from polyad.train.loop.step import issue_step
from polyad.train.tasks.random_input import losses_for
from tests.helpers.allocated import Observed


def second_step(config: RunConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that this process sends in the second step of a run, and what it holds after it."""
    engine, dims = _built(config)
    for step in range(2):
        traffic = Traffic(dims)
        batches = list(random_micro_batches(config, engine.world, step))
        with Observed(traffic):
            _take_step(engine, config, batches, losses_for(config.model))
    sent: dict[str, int] = {}
    for axis, size in traffic.sent.items():
        group = axis if axis in {"tensor", "expert"} else "data"
        sent[group] = sent.get(group, 0) + size
    return sent, bytes_held(engine)


def _built(config: RunConfig) -> tuple[Engine, Dims]:
    """The engine of a run at its start."""
    degrees = config.parallel
    world = comm.initialize(
        tensor_parallel_size=degrees.tensor_parallel_size,
        expert_parallel_size=degrees.expert_parallel_size,
    )
    dims = validate(config, world.size)
    start = InitialWeights(model_of(config), config.seed)
    return engine_of(config, world, start), dims


def _take_step(engine: Engine, config: RunConfig, batches: list[Any], losses: Any) -> None:
    given = iter(batches), len(batches), 1e-3
    issue_step(engine, losses, *given, losses=config.loss, progress=0.5)


def bytes_held(engine: Engine) -> dict[str, int]:
    """Bytes of weights and buffers, of what the optimizer keeps, and of gradients that stay."""
    tensors = _tensors(engine)
    found: dict[str, Any] = {}
    for kind, held in (
        ("weights", [*tensors["weights"], *engine.module.buffers()]),
        ("optimizer", tensors["optimizer"]),
        ("gradients", tensors["gradients"]),
    ):
        for tensor in held:
            storage = tensor.untyped_storage()
            found.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
    sizes = {"weights": 0, "gradients": 0, "optimizer": 0}
    for kind, size in found.values():
        sizes[kind] += size
    return sizes


def _tensors(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """What a rank holds between steps; the gradients are those for which stage 3 keeps memory."""
    zero = engine.deepspeed.optimizer
    masters = [p for group in engine.optimizer.param_groups for p in group["params"]]
    masters += getattr(zero, "fp32_partitioned_groups_flat", [])  # in stage 3
    states = engine.optimizer.state.values()
    moments = [each for s in states for each in s.values() if isinstance(each, torch.Tensor)]
    sums = getattr(zero, "grad_partitions_flat_buffer", None)  # in stage 3
    return {
        "weights": [getattr(p, "ds_tensor", p) for p in engine.module.parameters()],
        "optimizer": [*masters, *moments],
        "gradients": [] if sums is None else [sums],
    }


def save_start(config: RunConfig, folder: Path) -> None:
    """Writes a checkpoint of a model that has not been trained."""
    Saver(_built(config)[0], folder, keep=Retention()).save(1, {}, config.to_yaml(), {})


def measured_rise(config: RunConfig) -> int:
    """Bytes that a step at its peak takes beside the states, and a micro-batch, as measured."""
    engine, _ = _built(config)
    place = config.distill.teacher
    teacher = None if place is None else load_teacher(Path(place), config, engine.world.device)
    losses_of = losses_for(config.model, teacher)
    batches = list(random_micro_batches(config, engine.world, 0))

    _take_step(engine, config, batches, losses_of)
    with torch.profiler.profile(profile_memory=True) as profile:
        _take_step(engine, config, batches, losses_of)
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        held += change
        peak = max(peak, held)
    return peak + sum(tensor.nbytes for tensor in tensors_in(batches[0]))
