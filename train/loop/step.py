"""One optimizer step over the global batch, which may be rejected before the weights change.

Its statistics are exchanged, recorded, and used to update the routers.

Ranks exchange two vectors:

    loss, routing statistics            means over the micro-batches of the step and all processes
    signal, memory                      integers, of which the highest of all processes counts

Routers are updated from the first one on the device. Copies to the CPU are asynchronous, and read
after the next step is issued, so that a GPU never waits for the CPU.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyad.model.feedforward import FeedForward
from polyad.model.mixture import Mixture
from polyad.model.mumoe.layer import MuMoEHead
from polyad.model.output import RoutingStats, ask_for_statistics, entropy
from polyad.parallel import comm
from polyad.parallel.zero import Engine, StepResult
from polyad.train.guard.spikes import NO_LIMITS, Limits
from polyad.train.loop.losses import (
    InputRecorder,
    LossConfig,
    routing_loss,
    with_counts_of_all,
    with_sample_similarity,
)
from polyad.train.tasks.task import Batch, Predictor

Routing = tuple[RoutingStats, ...]
OF_MICRO_BATCHES = frozenset({"tokens", "similarity_loss", "sequence_loss"})
"""Fields of statistics that are not means over tokens."""
LARGEST_OF_LAYERS = frozenset({"load_max", "rank_load_max"})
"""Measures that are aggregated over layers by the maximum; others by the mean."""
NOT_RECORDED = frozenset({
    "tokens", "usage_E", "norm_mean_N", "norm_square_N",
    "distill_error", "distill_square",
})  # fmt: skip
"""Fields of statistics that are not recorded."""
MOST_LOADS = 4096
"""Maximum number of experts in a layer whose loads are recorded: more would fill a disk."""


class StepNumbers(NamedTuple):
    """The two vectors on the CPU."""

    loss: float
    """The mean over the targets of all samples."""
    routing: Routing
    """Averaged over the step; empty in a dense model."""
    highest: list[int]
    """The maximum over processes of each of their own numbers."""


class StepStatistics:
    """Loss and statistics of a step: sums over its micro-batches, then what processes exchange.

    If all micro-batches have equally many tokens, means of means are means over tokens. If not,
    because of padding, each is weighted by its tokens."""

    def __init__(self, device: torch.device) -> None:
        self.routing: Routing = ()
        """The last micro-batch's; once exchanged, averaged over the step, on the device."""
        self._sum = torch.zeros(1, device=device)
        self._count = 0
        self._ready: torch.cuda.Event | None = None

    def add(self, loss: Tensor, routing: Routing) -> None:
        """Adds a micro-batch."""
        parts = [loss]
        for stats in routing:
            for name, value in stats.tensors().items():
                if stats.tokens is not None and name not in OF_MICRO_BATCHES:
                    value = value * stats.tokens
                parts.append(value)
        flat = torch.cat([part.detach().reshape(-1).float() for part in parts])
        self._sum = flat if self._count == 0 else self._sum + flat
        self.routing, self._count = routing, self._count + 1

    def exchange(self, own: Sequence[int] = ()) -> None:
        """Averages over micro-batches and processes; every process calls it.

        Args:
            own: Integers of this process; equally many on each.
        """
        mean = self._sum / (self._count * comm.size())
        numbers = torch.tensor(own, dtype=torch.int64, pin_memory=mean.is_cuda)
        highest = numbers.to(mean.device, non_blocking=True)
        if own:
            highest = comm.max_over_ranks(highest)
        # In fp64 sums of few fp32 numbers are exact: the order of processes, which depends on a
        # number's place and so on whether a record is due, does not change what routers read.
        vector = comm.sum_over_ranks(mean.double()).float()
        self.routing = _cut(vector, self.routing)
        self._cpu = [vector, highest]
        if vector.is_cuda:
            self._cpu = [torch.empty_like(x, device="cpu", pin_memory=True) for x in self._cpu]
            self._cpu[0].copy_(vector, non_blocking=True)
            self._cpu[1].copy_(highest, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    @functools.cached_property
    def numbers(self) -> StepNumbers:
        """The exchanged vectors, the same on every process; waits for the copies to the CPU."""
        if self._ready is not None:
            self._ready.synchronize()
        vector, highest = self._cpu
        return StepNumbers(vector[0].item(), _cut(vector, self.routing), highest.tolist())


def _cut(vector: Tensor, like: Routing) -> Routing:
    """Splits a vector into statistics, after its first number."""
    first, routing = 1, []
    for stats in like:
        values = {}
        for name, value in stats.tensors().items():
            values[name] = vector[first : first + value.numel()].view(value.shape)
            first += value.numel()
        if stats.tokens is not None:
            tokens = values["tokens"]
            values = {n: v if n in OF_MICRO_BATCHES else v / tokens for n, v in values.items()}
        routing.append(stats.with_tensors(values))
    return tuple(routing)


def routing_record(routing: Routing, ranks: int = 1) -> dict[str, Any]:
    """Returns the statistics of a step under flat keys, for metrics.jsonl and trackers.

    Args:
        routing: Averaged over the step.
        ranks: Processes that have different experts.

    Returns:
        `routing/LAYER/MEASURE` for each layer, and `routing/MEASURE` over all layers: the mean, or
        for loads the maximum. Empty for a dense model.
    """
    of_layers: dict[str, Any] = {}
    numbers: dict[str, list[float]] = {}
    for stats in routing:
        for name, value in measures(stats, ranks).items():
            of_layers[f"routing/{stats.name}/{name}"] = value
            if isinstance(value, float):
                numbers.setdefault(name, []).append(value)
    record: dict[str, Any] = {}
    for name, values in numbers.items():
        mean = math.fsum(values) / len(values)
        record[f"routing/{name}"] = max(values) if name in LARGEST_OF_LAYERS else mean
    return record | of_layers


def measures(stats: RoutingStats, ranks: int = 1) -> dict[str, float | int | list[float]]:
    """Returns one layer's statistics as numbers; a single expert has no loads.

    A mean of nonnegative numbers is 0 only if all of them are, also in floating point. So an expert
    counts as unused if no token of the step used it, in any micro-batch of any process.

    Args:
        stats: Averaged over a step, or over one forward pass.
        ranks: Processes that have different experts.

    Returns:
        `load_max`: the load of the busiest expert over the mean load of its level; `unused`: the
        share of unused experts; `usage_entropy`: the entropy in nats of the scores averaged over
        tokens, summed over levels; `load`: each expert's share of the assignments, unless the layer
        has one expert or more than `MOST_LOADS`; `rank_load` with several processes: the share of
        the assignments that each computes; `rank_load_max`: the largest over the mean; `nmse` of a
        feed-forward that learns from another: the squared error over the squared target;
        `attention_head`: the head from which a graph is made; the other tensors of the layer's
        statistics, by their names.
    """
    load_E = stats.load_E
    usage_E = load_E if stats.usage_E is None else stats.usage_E
    sizes = list(stats.levels or load_E.shape)
    levels = load_E.split_with_sizes(sizes)
    routes = len(load_E) > 1
    values: dict[str, float | int | list[float]] = {}
    if routes:
        values["load_max"] = max(map(_most, levels))
        values["unused"] = (load_E == 0).float().mean().item()
    if "entropy" in stats.measures:
        of_levels = usage_E.split_with_sizes(sizes)
        values["usage_entropy"] = math.fsum(entropy(p_N).item() for p_N in of_levels)
    if routes and ranks > 1 and not stats.levels:  # a process has experts of consecutive numbers
        load_R = load_E.view(ranks, -1).sum(1)
        values |= {"rank_load": _short(load_R.tolist()), "rank_load_max": _most(load_R)}
    for name, value in stats.tensors().items():
        if name in NOT_RECORDED or value.numel() > MOST_LOADS or (name == "load_E" and not routes):
            continue
        if name == "load_E" and "active" in stats.measures:  # sums to less than 1
            value = value / value.sum().clamp_min(torch.finfo(value.dtype).tiny)
        short = name.rpartition("_")[0] if name.endswith(("_E", "_A", "_S", "_L")) else name
        values[short] = value.item() if value.dim() == 0 else _short(value.tolist())
    if "distill_error" in stats.measures:
        error, square = (stats.measures[name] for name in ("distill_error", "distill_square"))
        values["nmse"] = (error / square).item()
    if "attention_head" in stats.measures:  # equal in all micro-batches up to rounding
        values["attention_head"] = round(stats.measures["attention_head"].item())
    return values


def _most(load_N: Tensor) -> float:
    """The largest share divided by the mean; 0 if all are 0."""
    total = load_N.sum().item()
    return load_N.max().item() * load_N.numel() / total if total else 0.0


def _short(numbers: list[float]) -> list[float]:
    """Rounds to six digits, since thousands of experts per layer would fill a disk. 0 stays 0."""
    return [float(f"{number:.6g}") for number in numbers]


NO_OTHER_LOSS = LossConfig()
REFUSE = -1.0
"""A limit of the gradient norm that rejects every step, because a norm is never negative."""


class IssuedStep(NamedTuple):
    """An optimizer step over the global batch, which a GPU may not have finished yet."""

    result: StepResult
    statistics: StepStatistics
    """Exchanged; its `numbers` wait for the GPU."""


def issue_step(
    engine: Engine,
    task_losses: Callable[[Predictor, Batch], tuple[Tensor, Routing]],
    micro_batches: Iterator[Batch],
    accumulation_steps: int,
    learning_rate: float,
    *,
    losses: LossConfig = NO_OTHER_LOSS,
    progress: float = 0.0,
    limits: Limits = NO_LIMITS,
    own: Callable[[], Sequence[int]] = tuple,
    record_is_due: bool = True,
) -> IssuedStep:
    """Issues one optimizer step over the global batch.

    Args:
        engine: model and optimizer.
        task_losses: computes the loss on a micro-batch; see `Task.losses`.
        micro_batches: this process's micro-batches, in order, on the engine's device.
        accumulation_steps: number of micro-batches per step.
        learning_rate: the step's learning rate.
        losses: coefficients of the routed layers' auxiliary losses.
        progress: share of the run's steps done after this one, for routers that change over a run.
        limits: the same on all processes; a step whose loss or norm exceeds them changes nothing.
            Finite limits are checked before the weights change, which waits for the loss.
        own: returns numbers of this process to share with all; see `StepStatistics.exchange`.
        record_is_due: the same on all processes; see `ask_for_statistics`.

    Returns:
        Whether the step was applied, and its numbers, which may not have arrived on the CPU yet.
    """
    statistics, pairs = StepStatistics(engine.device), losses.sample_similarity
    names = losses.asked()
    ask_for_statistics(
        engine.module,
        losses=names,
        samples=pairs is not None,
        record_is_due=record_is_due,
    )
    predictor: Predictor = engine
    if pairs is not None:
        predictor = recorder = InputRecorder(engine, getattr(engine.module, "as_read", None))
    mean_tokens = None
    if names:
        mean_tokens, micro_batches = _mean_tokens(micro_batches, accumulation_steps)
    for number in range(accumulation_steps):
        if number:
            engine.step(learning_rate)  # DeepSpeed updates only after the last micro-batch
        of_targets, routing = task_losses(predictor, next(micro_batches))
        loss = of_targets.mean()
        if pairs is not None:
            routing = with_sample_similarity(routing, recorder.inputs, pairs)
        if losses.load_balance and losses.load_balance_counts == "all":
            routing = with_counts_of_all(routing, comm.mean_over_ranks)
        statistics.add(loss, routing)
        auxiliary = routing_loss(routing, losses, mean_tokens)
        if auxiliary is not None:
            loss = loss + auxiliary
        engine.backward(loss)
    statistics.exchange(own())
    refused = math.isfinite(limits.loss) and statistics.numbers.loss > limits.loss
    result = engine.step(learning_rate, REFUSE if refused else limits.grad_norm)
    assert result is not None
    if result.applied:
        for stats in statistics.routing:  # updates buffers that routers read in their forward pass
            layer = engine.module.get_submodule(stats.name)
            assert isinstance(layer, FeedForward | MuMoEHead | Mixture)
            layer.update(stats, progress)
    return IssuedStep(result, statistics)


def _mean_tokens(
    micro_batches: Iterator[Batch], accumulation_steps: int
) -> tuple[Tensor | None, Iterator[Batch]]:
    """Returns the mean tokens of a step's micro-batches on all processes, and the micro-batches.

    All processes call this together. Padded micro-batches are read ahead for it. Of others, which
    may be large images, one is read and nothing is exchanged, since all have equally many tokens.
    """
    first = next(micro_batches)
    if not hasattr(first, "real_tokens"):
        return None, itertools.chain([first], micro_batches)
    batches: list[Any] = [first, *itertools.islice(micro_batches, accumulation_steps - 1)]
    counts = torch.stack([batch.real_tokens for batch in batches])
    total = comm.sum_over_ranks(counts.sum().float())
    return total / (len(batches) * comm.size()), iter(batches)
