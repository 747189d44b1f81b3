"""How a run would scale: as much work for each GPU, and the same work for ever more of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from polyad.parallel.dims import Dims
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig
from polyad.train.forecast.forecast import Machines
from polyad.train.forecast.layouts import changed, tried

MOST = 1024
"""Processes of the largest prediction."""


def scaling(
    config: RunConfig,
    machines: Machines,
    *,
    imbalance: float = 1.0,
    most: int = MOST,
    told: Callable[[float], None] = lambda share: None,
) -> dict[str, list[dict[str, Any]]]:
    """Predicts throughput from the fewest processes that the degrees allow to `most`.

    Args:
        config: Of the run on `machines`: its degrees stay. Weak scaling keeps a process's samples
            of a step; strong scaling keeps the global batch, and lowers the micro-batch where there
            are no samples left to accumulate.
        machines: What it runs on.
        imbalance: See `forecast`.
        most: Processes of the last prediction.
        told: Called with the share that is done.

    Returns:
        For `weak` and `strong` a point for each number of processes: `processes`,
        `units_per_second`, `step_seconds`, `efficiency` (throughput of a process over that of the
        first point), `memory_bytes`, `fits`, and `why`, the largest cost beside products.
    """
    points: dict[str, list[dict[str, Any]]] = {"weak": [], "strong": []}
    asked = list(_asked(config, machines, most))
    for number, (kind, processes, changes) in enumerate(asked):
        if number:
            told(number / len(asked))
        try:
            other = changed(config, changes)
            dims: Dims = validate(other, processes)
        except ValueError:
            continue
        here = min(machines.processes_per_node, processes)
        place = replace(machines, nodes=max(1, processes // here), processes_per_node=here)
        layout = tried(other, dims, changes, place, imbalance)
        rate = other.train.global_batch_size * other.model.units_per_sample() / layout.seconds
        point = {
            "processes": processes,
            "units_per_second": rate,
            "step_seconds": layout.seconds,
            "memory_bytes": layout.memory,
            "fits": layout.memory <= machines.device.memory,
            "why": layout.why,
        }
        first = (points[kind] or [point])[0]
        of_first = first["units_per_second"] / first["processes"]
        points[kind].append(point | {"efficiency": rate / processes / of_first})
    told(1.0)
    return points


def _asked(
    config: RunConfig, machines: Machines, most: int
) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    tensor = config.parallel.tensor_parallel_size
    processes = tensor * config.parallel.expert_parallel_size
    while processes <= most:
        for kind, changes in batches_of(config, processes, machines.processes).items():
            yield kind, processes, changes
        processes *= 2


def batches_of(config: RunConfig, processes: int, base: int) -> dict[str, tuple[str, ...]]:
    """What changes in a configuration's batches when other numbers of processes run it.

    Args:
        config: Of a run of `base` processes.
        processes: That run it instead.
        base: See above.

    Returns:
        For `weak`, where a process keeps its samples of a step, and `strong`, where all of them
        together do, values of keys; without a kind that leaves some process no sample.
    """
    train = config.train
    ranks = processes // config.parallel.tensor_parallel_size
    found: dict[str, tuple[str, ...]] = {}
    weak = train.global_batch_size * processes // base
    if weak:
        micro = min(train.micro_batch_size, max(1, weak // ranks))
        found["weak"] = (
            f"train.global_batch_size={weak}",
            f"train.micro_batch_size={micro}",
        )
    micro = min(train.micro_batch_size, train.global_batch_size // ranks)
    if micro:
        found["strong"] = (f"train.micro_batch_size={micro}",)
    return found
