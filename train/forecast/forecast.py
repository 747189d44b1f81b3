"""Contents of a plan: memory, collectives, time, and how often to save (Young and Daly)."""

from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from polyad.parallel.dims import Dims
from polyad.parallel.plan.devices import Device
from polyad.parallel.plan.traffic import Exchanges
from polyad.train.config.adaptation import model_of
from polyad.train.config.plan import checkpoint_bytes
from polyad.train.config.run import RunConfig
from polyad.train.forecast.step import Footprint, footprint
from polyad.train.forecast.times import Place, StepTime, seconds_by_axis, step_time
from polyad.train.tasks.random_input import flops_of_unit
from polyad.train.tasks.registry import task_class

HOURS_OF_ONE = 50_000.0
"""Mean hours between failures of one GPU with its share of a node. Llama 3's run had 419 unexpected
interruptions in 54 days on 16,384 GPUs (Dubey et al. 2024, section 3.3.4): one in 50,700 hours."""
RESTART_SECONDS = 300.0
"""Seconds until a failed run trains again: restarting, and loading a checkpoint."""


class Saving(NamedTuple):
    """How often a run saves, and the cost of saving and failures."""

    interval: float
    """Seconds between checkpoints."""
    stall: float
    """Seconds that training pauses for a checkpoint."""
    failure_every: float
    """Mean seconds between failures of any process."""
    lost_share: float
    """The share of the time lost to stalls, repeated steps and restarts."""


def lost_share(interval: float, stall: float, failure_every: float, restart: float) -> float:
    """Computes the share of lost time: stalls, half an interval at each failure, and restarts."""
    return stall / interval + (interval / 2 + stall + restart) / failure_every


def best_saving(stall: float, processes: int, hours_of_one: float = HOURS_OF_ONE) -> Saving:
    """The interval with the least loss: sqrt(2 s M) - s, for stalls of s and failures every M.

    Source: Young 1974 without the second term; Daly 2006, equation 11.

    Args:
        stall: Seconds that training pauses for a checkpoint.
        processes: Number of processes; one failure ends all.
        hours_of_one: Mean hours between failures of one process.
    """
    every = 3600 * hours_of_one / processes
    interval = max(sqrt(2 * stall * every) - stall, stall, 1.0)
    return saving(interval, stall, processes, hours_of_one)


def saving(
    interval: float, stall: float, processes: int, hours_of_one: float = HOURS_OF_ONE
) -> Saving:
    """Computes the cost of a given interval; see `best_saving`."""
    every = 3600 * hours_of_one / processes
    return Saving(interval, stall, every, lost_share(interval, stall, every, RESTART_SECONDS))


HOST_COPY = 20e9
"""Bytes per second from a GPU to CPU memory, which limits asynchronous checkpoints."""
KINDS = (
    "weights", "gradients", "optimizer", "teacher", "activations", "experts", "loss",
    "communication", "libraries", "allocator",
)  # fmt: skip
"""Kinds of memory, in the order of display."""


def degrees_of(config: RunConfig, dims: Dims) -> dict[str, int]:
    """The layout of a run, for a result."""
    train = config.train
    return {
        "processes": dims.world_size,
        "data_parallel_size": dims.data_parallel_size,
        "tensor_parallel_size": dims.tensor_parallel_size,
        "expert_parallel_size": dims.expert_parallel_size,
        "zero_stage": config.parallel.zero_stage,
        "micro_batch_size": train.micro_batch_size,
        "accumulation_steps": dims.accumulation_steps(
            train.global_batch_size, train.micro_batch_size
        ),
    }


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines for which a run is planned."""

    device: Device
    nodes: int
    processes_per_node: int
    storage: float = 2e9
    """Bytes per second that a node writes to the checkpoint folder."""
    hours_of_one: float = HOURS_OF_ONE
    """Mean hours between failures of one process."""

    @property
    def processes(self) -> int:
        """The total number of processes."""
        return self.nodes * self.processes_per_node


def forecast(
    config: RunConfig, dims: Dims, machines: Machines, *, imbalance: float = 1.0
) -> dict[str, Any]:
    """Predicts a run on GPUs.

    Args:
        config: Resolved configuration that fits the layout.
        dims: The layout.
        machines: The machines.
        imbalance: Rows of experts on the busiest process divided by the mean over all.

    Returns:
        JSON values from `describe_forecast`.
    """
    found = footprint(config, dims, imbalance=imbalance, on_gpu=True)
    spent = predicted_time(config, dims, machines, found)
    memory = with_libraries(found.memory, machines.device)
    result = describe_forecast(
        config,
        dims,
        machines,
        found,
        spent,
        memory,
        peak=machines.device.peak(config.train.precision, tf32=config.train.tf32),
    )
    return result | {"imbalance": imbalance}


def by_recomputation(
    config: RunConfig, dims: Dims, machines: Machines, *, imbalance: float = 1.0
) -> dict[str, dict[str, Any]]:
    """Predicts memory and time of each recomputation mode, by value of `model.recompute`.

    Returns:
        For each mode `activations` and `total` (peak bytes of a process) and `seconds` (per step);
        empty for models without such modes.
    """
    modes = {}
    for mode in ("none", "block") if hasattr(config.model, "recompute") else ():
        model = config.model.model_copy(update={"recompute": mode})
        other = config.model_copy(update={"model": model})
        found = footprint(other, dims, imbalance=imbalance, on_gpu=True)
        modes[mode] = {
            "activations": found.memory.get("activations", 0),
            "total": sum(with_libraries(found.memory, machines.device).values()),
            "seconds": predicted_time(other, dims, machines, found).total,
        }
    return modes


def predicted_time(config: RunConfig, dims: Dims, machines: Machines, found: Footprint) -> StepTime:
    """Predicts the time of a step on GPUs."""
    return step_time(
        found.work,
        found.exchanges,
        machines.device,
        place_of(config, dims, machines),
        tf32=config.train.tf32,
        compiled=config.model.compile,
    )


def place_of(config: RunConfig, dims: Dims, machines: Machines) -> Place:
    """The placement of a process."""
    return Place(
        dims=dims,
        processes_of_node=machines.processes_per_node,
        zero_stage=config.parallel.zero_stage,
    )


def with_libraries(memory: dict[str, int], device: Device) -> dict[str, int]:
    """Adds the memory of libraries, and the allocator's overhead."""
    share = round(sum(memory.values()) * device.allocator_share)
    return memory | {"libraries": device.libraries, "allocator": share}


def memory_by_kind(found: Footprint, device: Device) -> dict[str, int]:
    """Peak bytes of a process by kind, in the order of display, and their `total`."""
    return _by_kind(with_libraries(found.memory, device))


def _by_kind(memory: dict[str, int]) -> dict[str, int]:
    held = {kind: memory[kind] for kind in KINDS if memory.get(kind)}
    return held | {"total": sum(held.values())}


def describe_forecast(
    config: RunConfig,
    dims: Dims,
    machines: Machines,
    found: Footprint,
    spent: StepTime,
    memory: dict[str, int],
    *,
    peak: float | None,
) -> dict[str, Any]:
    """Makes the contents of a plan.

    Args:
        config: Resolved configuration.
        dims: The layout.
        machines: The machines.
        found: Memory, communication and computation of a process.
        spent: Time of a step.
        memory: Peak bytes by kind, including libraries.
        peak: FLOP/s of one device; None: without MFU.

    Returns:
        JSON values.
    """
    train, world = config.train, dims.world_size
    unit = task_class(config.data.kind).unit.name
    units = train.global_batch_size * config.model.units_per_sample()
    rate = units / spent.total
    flops = flops_of_unit(config.model, config.data)
    held = _by_kind(memory)
    return {
        "prediction": True,
        "unit": unit,
        "parameters": found.parameters,
        "layout": {
            "device": machines.device.name,
            "nodes": machines.nodes,
            "processes_per_node": machines.processes_per_node,
            **degrees_of(config, dims),
            "global_batch_size": train.global_batch_size,
        },
        "memory_bytes": held | {"device": machines.device.memory},
        "largest_bytes": {kind: found.largest[kind] for kind in KINDS if kind in found.largest},
        "fits": held["total"] <= machines.device.memory,
        "exchanges": _exchanges(found.exchanges, place_of(config, dims, machines)),
        "step": {
            "seconds": spent.total,
            "products": spent.products,
            "attention": spent.attention,
            "memory": spent.memory,
            "idle": spent.idle,
            "exchanges": seconds_by_axis(spent.exposed),
            "hidden_exchanges": spent.hidden,
        },
        f"{unit}s_per_second": rate,
        "mfu": rate * flops / (peak * world) if peak else None,
        "run": {
            "steps": train.steps,
            f"{unit}s": train.steps * units,
            "seconds": train.steps * spent.total,
            "device_hours": train.steps * spent.total * world / 3600,
        },
        "checkpoint": _checkpoint(config, machines, spent.total),
    }


def _exchanges(exchanges: Exchanges, place: Place) -> list[dict[str, Any]]:
    rows = []
    for exchange, amount in sorted(exchanges.items(), key=lambda each: -each[1].sent):
        size, here = place.group(exchange.axis)
        rows.append(
            {
                **exchange._asdict(),
                "processes": size,
                "link": "network" if here < size else "node",
                "calls": amount.calls,
                "payload_bytes": amount.payload,
                "sent_bytes": amount.sent,
            }
        )
    return rows


def _checkpoint(config: RunConfig, machines: Machines, seconds: float) -> dict[str, Any]:
    size = checkpoint_bytes(config, model_of(config))
    if config.checkpoint.asynchronous:
        stall = size / machines.processes / HOST_COPY
    else:
        stall = size / (machines.storage * machines.nodes)
    best = best_saving(stall, machines.processes, machines.hours_of_one)
    result = {
        "bytes": size,
        "stall_seconds": stall,
        "failure_every_seconds": best.failure_every,
        "best_interval_seconds": best.interval,
        "best_every_steps": max(1, round(best.interval / seconds)),
        "lost_share": best.lost_share,
    }
    if config.checkpoint.every:
        chosen = saving(
            config.checkpoint.every * seconds, stall, machines.processes, machines.hours_of_one
        )
        result |= {"every_steps": config.checkpoint.every, "lost_share_then": chosen.lost_share}
    return result
