"""A plan for this machine: each operation and collective of a step is done here, and timed."""

import os
from itertools import pairwise
from typing import Any

from polyad.parallel import comm
from polyad.parallel.plan.devices import Device
from polyad.parallel.plan.replay import exchanged_here, host_seconds, replayed
from polyad.train.config.agreement import agreed_facts
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig
from polyad.train.console import Progress
from polyad.train.forecast.forecast import Machines, describe_forecast
from polyad.train.forecast.measured import RandomTraining
from polyad.train.forecast.step import footprint
from polyad.train.forecast.times import StepTime

LIBRARIES = 400_000_000
"""Bytes that Python and its libraries take in a process."""


def forecast_here(
    config: RunConfig, processes: int, *, check_steps: int = 0
) -> dict[str, Any] | None:
    """Predicts a run in so many processes of this machine, which all call it.

    Args:
        config: Resolved.
        processes: Of the run; torchrun has started them if there are several.
        check_steps: Steps that are really done after it.

    Returns:
        JSON values, with `measured` if steps were done; None on all processes but one.
    """
    dims = validate(config, processes)
    found = footprint(config, dims)
    degrees = config.parallel
    world = comm.initialize(
        degrees.timeout_minutes,
        degrees.tensor_parallel_size,
        degrees.expert_parallel_size,
        agreed_facts(config, None),
    )
    progress = Progress("operations", len(found.work), "op") if world.is_main else _silent
    spent = replayed(found.work, progress)
    between = host_seconds() * sum(times for _, times in found.work)
    kinds = {"products": 0.0, "attention": 0.0, "memory": 0.0}
    products = {each.name for each, _ in found.work if each.flops}
    for (_, name), seconds in spent.items():
        kind = "attention" if "attention" in name else "memory"
        kinds["products" if kind == "memory" and name in products else kind] += seconds
    exposed = exchanged_here(dims, found.exchanges)  # a CPU that sends does not compute
    total = StepTime(**kinds, idle=between, exposed=exposed, hidden=0.0)
    measured = _measured(config, world, check_steps) if check_steps else None
    comm.shutdown()
    if not world.is_main:
        return None
    memory = found.memory | {"libraries": LIBRARIES}
    machines = Machines(device=_this_machine(processes), nodes=1, processes_per_node=processes)
    result = describe_forecast(config, dims, machines, found, total, memory, peak=None)
    if measured is not None:
        off = total.total / measured - 1
        result["measured"] = {"step_seconds": measured, "prediction_off_by": off}
    return result


def _silent(share: float) -> None:
    """Only one process tells."""


def _this_machine(processes: int) -> Device:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
    return Device(
        name="cpu-here",
        peaks=(0.0, 0.0, 0.0),
        memory=memory,
        bandwidth=0.0,
        node_link=0.0,
        network_link=0.0,
        processors=0,
    )


def _measured(config: RunConfig, world: comm.World, steps: int) -> float:
    """The median of real steps, after one that warms up."""
    ends = RandomTraining(config, world).ends(1 + steps)
    times = sorted(b - a for a, b in pairwise(ends))
    return times[(len(times) - 1) // 2]
