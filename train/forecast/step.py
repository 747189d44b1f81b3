"""A step of a configuration on a layout, on shapes alone: memory, collectives and operations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polyad.model.build import build_model, initial_value, place
from polyad.model.decoder import DecoderSettings
from polyad.model.feedforward import FeedForward
from polyad.model.kernels import switch
from polyad.model.smoe.layer import SparseMoE
from polyad.parallel.checkpoint.format import Box
from polyad.parallel.dims import Dims
from polyad.parallel.plan.memory import Memory
from polyad.parallel.plan.traffic import Amount, Exchanges, Traffic
from polyad.parallel.plan.weightless import Weightless
from polyad.parallel.plan.work import Computed, Phase, Work
from polyad.parallel.plan.world import assume_rows, pretended_world
from polyad.parallel.source import WeightSource
from polyad.parallel.zero import DTYPES, Engine
from polyad.train.config.adaptation import model_of
from polyad.train.config.distillation import teacher_model
from polyad.train.config.parts import engine_of
from polyad.train.config.run import RunConfig
from polyad.train.loop.step import issue_step
from polyad.train.tasks.block_teacher import BlockTeacher
from polyad.train.tasks.losses import Teacher
from polyad.train.tasks.random_input import losses_for, random_batch

HALF, LAST = 0.5, 1 - 1e-6
"""Share of a run's steps done, at which footprints are taken."""
OWN_NUMBERS = 5
"""Number of values that a process shares in each step: a signal, its memory, its speed."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory, communication and computation of one process in a step."""

    parameters: int
    """Number of parameters of the whole model."""
    memory: dict[str, int]
    """Bytes by kind at the overall peak."""
    largest: dict[str, int]
    """Bytes of each kind at the peak of that kind."""
    between_steps: dict[str, int]
    """Bytes by kind that persist between steps."""
    exchanges: Exchanges
    """The collectives of an optimizer step."""
    work: list[tuple[Work, int]]
    """Operations of an optimizer step, and the number of times each is executed."""


class _Nothing(WeightSource):
    """A source of weights whose values do not matter."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def weight(self, box: Box) -> torch.Tensor:
        """Zeros."""
        return torch.zeros(box.size)

    def buffer(self, name: str) -> torch.Tensor:
        """A buffer's initial value."""
        return initial_value(self._model, name, 0)


def footprint(
    config: RunConfig, dims: Dims, *, imbalance: float = 1.0, on_gpu: bool = False
) -> Footprint:
    """Runs steps of one process on shapes alone.

    The second step is measured, since DeepSpeed learns the order of parameters in the first. If
    steps grow during a run, it is a step from the middle, and memory is that of the last ones. Of
    many micro-batches only the first and the last are run; those between equal the first.

    Args:
        config: Resolved configuration that fits the layout.
        dims: The layout.
        imbalance: Rows of experts on this process divided by the mean over all.
        on_gpu: Whether to use the operations of a GPU.
    """
    train = config.train
    micro_batches = dims.accumulation_steps(train.global_batch_size, train.micro_batch_size)
    run = min(micro_batches, 2)
    memory = Memory()
    phases: list[Phase] = []
    traffic = _Parts(lambda: Traffic(dims, 0))
    computed = _Parts(lambda: Computed(lambda: phases[0]() if phases else "build"))
    with (
        switch.without_numbers(on_gpu=on_gpu),
        pretended_world(dims) as world,
        Weightless([memory, traffic, computed]) as weightless,
    ):
        whole = model_of(config)
        engine = engine_of(
            config,
            dims,
            world,
            _Nothing(whole),
            global_batch_size=run * train.micro_batch_size * dims.data_parallel_size,
        )
        assume_rows(engine.module, imbalance)
        phases.append(Phase(engine.module))
        _name_state(engine, memory, weightless)
        teacher = _teacher(config, memory)
        if isinstance(teacher, BlockTeacher):
            teacher.teach(engine.module)
        batch = random_batch(config.model, range(train.micro_batch_size), config.data)
        for tensor in batch:
            weightless.forget(tensor)

        def parts() -> Iterator[Any]:
            for number in range(run):
                traffic.begin(number == run - 1)
                computed.begin(number == run - 1)
                yield batch

        def step(progress: float) -> None:
            memory.start_peak()
            for counter in (traffic, computed):
                counter.clear()
            issue_step(
                engine,
                losses_for(config.model, teacher),
                parts(),
                run,
                1e-3,
                losses=config.loss,
                progress=progress,
                own=lambda: (0,) * OWN_NUMBERS,
            )

        later = _takes_more_later(engine.module)
        step(HALF)
        step(LAST if later else HALF)
        exchanges, work = _exchanges(traffic, micro_batches), _work(computed, micro_batches)
        if later:
            step(LAST)
        return Footprint(
            parameters=sum(p.numel() for p in whole.parameters()),
            memory={kind: size for kind, size in memory.peak.items() if size},
            largest={kind: size for kind, size in memory.largest.items() if size},
            between_steps={kind: size for kind, size in memory.now.items() if size},
            exchanges=exchanges,
            work=work,
        )


def _takes_more_later(model: nn.Module) -> bool:
    """Whether tokens get more experts during a run."""
    sparse = [module.config for module in model.modules() if isinstance(module, SparseMoE)]
    return any(config.final_top_k is not None for config in sparse)


def _teacher(config: RunConfig, memory: Memory) -> Teacher | BlockTeacher | None:
    """The run's teacher, or teaching feed-forwards, whole on each process, without values."""
    loss = config.distill.blocks
    if loss is None:
        settings, names = teacher_model(config), {}
    else:
        assert isinstance(config.model, DecoderSettings)
        blocks = config.model.replaced_blocks()
        settings = config.model.original()
        names = {block: f"blocks.{block}.feed_forward" for block in blocks}
    if settings is None:
        return None
    begins = tuple(f"{name}." for name in names.values()) or ("",)
    model = build_model(settings).requires_grad_(False).eval()
    weights = [
        (n, torch.empty(p.shape)) for n, p in model.named_parameters() if n.startswith(begins)
    ]
    place(model, weights, "cpu", DTYPES[config.train.precision])
    buffers = [n for n, _ in model.named_buffers() if n.startswith(begins)]
    place(model, ((name, initial_value(model, name, 0)) for name in buffers), "cpu")
    parts = [model.get_submodule(name) for name in names.values()] or [model]
    memory.name([t for part in parts for t in (*part.parameters(), *part.buffers())], "teacher")
    if loss is None:
        return Teacher(model, config.distill)
    layers = {block: model.get_submodule(name) for block, name in names.items()}
    return BlockTeacher({b: f for b, f in layers.items() if isinstance(f, FeedForward)}, loss)


class _Parts:
    """An observer for all micro-batches of a step except the last, and one for that and the
    update."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self.clear()

    def clear(self) -> None:
        """Resets both observers."""
        self.first, self.last = self._make(), self._make()
        self._now = self.first

    def begin(self, is_last: bool) -> None:
        """Starts a micro-batch."""
        self._now = self.last if is_last else self.first

    def __call__(self, operation: Any) -> None:
        """Passes it to the current observer."""
        self._now(operation)


def _exchanges(traffic: _Parts, micro_batches: int) -> Exchanges:
    found = dict(traffic.last.exchanges)
    for key, amount in traffic.first.exchanges.items():
        found[key] = found.get(key, Amount()) + amount.times(micro_batches - 1)
    return found


def _work(computed: _Parts, micro_batches: int) -> list[tuple[Work, int]]:
    times = computed.last.times.copy()
    for key, number in computed.first.times.items():
        times[key] += number * (micro_batches - 1)
    of = computed.first.of | computed.last.of
    return [(of[key], number) for key, number in times.items()]


def _name_state(engine: Engine, memory: Memory, weightless: Weightless) -> None:
    """Labels the memory of an engine by kind, and marks its values as unknown."""
    held = engine.tensors()
    weights, state = held["weights"], held["optimizer"]
    memory.name(state, "optimizer")
    memory.name([*weights, *engine.module.buffers()], "weights")
    memory.name(held["gradients"], "gradients")
    for tensor in (*state, *weights):
        if tensor.numel() > 1:  # the step's number has a known value
            weightless.forget(tensor)
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            continue
        parameter.register_hook(lambda g: memory.name([g], "gradients"))  # type: ignore[no-untyped-call]
