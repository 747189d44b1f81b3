"""Routing statistics of an optimizer step: reported, and used to update the routers."""

import math
from typing import Any

from torch import Tensor, nn

from polyad.model.feedforward import FeedForward
from polyad.model.mixture import Mixture
from polyad.model.mumoe.head import MuMoEHead
from polyad.model.output import RoutingStats, entropy
from polyad.train.loop.statistics import Routing, tensors_of


def update_routers(module: nn.Module, routing: Routing, progress: float) -> None:
    """Updates buffers that routers read in their forward pass; called after each optimizer step.

    Args:
        module: The model.
        routing: Averaged over the step, on the module's device.
        progress: Share of the run's steps that are done.
    """
    for stats in routing:
        layer = module.get_submodule(stats.name)
        assert isinstance(layer, FeedForward | MuMoEHead | Mixture)
        layer.update(stats, progress)


LARGEST_OF_LAYERS = frozenset({"load_max", "rank_load_max"})
"""Measures of which all layers together have the largest; of others they have the mean."""


NOT_RECORDED = frozenset({"tokens", "usage_E", "norm_mean_N", "norm_square_N", "expert_input_ED"})
"""Fields of statistics that no record has."""


ROUNDING = 1e-5
"""Of the mean load: loads that differ by less are equal."""


def routing_record(routing: Routing, ranks: int = 1) -> dict[str, Any]:
    """The statistics of a step as flat keys, for metrics.jsonl and trackers.

    Args:
        routing: Averaged over the step.
        ranks: Processes that have different experts.

    Returns:
        `routing/LAYER/MEASURE` for each layer, and `routing/MEASURE` for all layers: the mean, but
        for loads the largest. Empty for a model that does not route.
    """
    layers = {stats.name: measures(stats, ranks) for stats in routing}
    record: dict[str, Any] = {}
    for name in {key: None for values in layers.values() for key in values}:
        of_layers = [values.get(name) for values in layers.values()]
        numbers = [value for value in of_layers if isinstance(value, float)]
        if numbers:
            record[f"routing/{name}"] = (
                max(numbers) if name in LARGEST_OF_LAYERS else math.fsum(numbers) / len(numbers)
            )
    for layer, values in layers.items():
        record |= {f"routing/{layer}/{name}": value for name, value in values.items()}
    return record


def measures(stats: RoutingStats, ranks: int = 1) -> dict[str, float | int | list[float]]:
    """One layer's statistics as numbers.

    A mean over tokens of numbers that are never negative is 0 only if all of them are, and sums of
    such numbers in floating point keep that: an expert counts as unused if no token of the step,
    in any micro-batch of any process, gave it anything.

    Args:
        stats: Averaged over a step, or over one forward pass.
        ranks: Processes that have different experts.

    Returns:
        `load_max`: the load of the busiest expert over the mean load of its level; `unused`: the
        share of the experts that got nothing; `usage_entropy`: the entropy of the mean over tokens
        of the scores, in nats, of several levels the sum; `load`: the share of the assignments of
        each expert; `busiest` and `idlest` of sparse experts: their numbers; `rank_load` over
        several processes: the share of the assignments that each computes; `rank_load_max`: the
        largest over the mean; `attention_head`: the number of the head that a graph is made of;
        the other fields of `RoutingStats` that the layer has, by their names.
    """
    load_E = stats.load_E
    usage_E = load_E if stats.usage_E is None else stats.usage_E
    sizes = list(stats.levels or load_E.shape)
    levels = load_E.split_with_sizes(sizes)
    values: dict[str, float | int | list[float]] = {
        "load_max": max(map(_most, levels)),
        "unused": (load_E == 0).float().mean().item(),
        "usage_entropy": math.fsum(entropy(p_N).item() for p_N in usage_E.split_with_sizes(sizes)),
    }
    if not stats.levels:
        values |= {"busiest": _first_of_most(load_E), "idlest": _first_of_most(-load_E)}
    if ranks > 1 and not stats.levels:  # a process has experts of consecutive numbers
        load_R = load_E.view(ranks, -1).sum(1)
        values |= {"rank_load": _short(load_R.tolist()), "rank_load_max": _most(load_R)}
    for name, value in tensors_of(stats).items():
        if name in NOT_RECORDED:
            continue
        short = name.rpartition("_")[0] if name.endswith(("_E", "_A", "_S", "_L")) else name
        values[short] = value.item() if value.dim() == 0 else _short(value.tolist())
    if stats.attention_head is not None:  # the same in all micro-batches, but for rounding
        values["attention_head"] = round(stats.attention_head.item())
    return values


def _most(load_N: Tensor) -> float:
    """The largest share over the mean."""
    return load_N.max().item() * load_N.numel()


def _first_of_most(load_E: Tensor) -> int:
    """The number of the largest; of equal ones the first, whatever rounding makes of them."""
    return int((load_E >= load_E.max() - ROUNDING / load_E.numel()).nonzero()[0])


def _short(numbers: list[float]) -> list[float]:
    """Rounds to six digits, since thousands of experts a layer would fill a disk. 0 stays 0."""
    return [float(f"{number:.6g}") for number in numbers]


def console_summary(record: dict[str, Any]) -> list[str]:
    """The routing part of a step's line for a person.

    Args:
        record: With the keys of `routing_record`; none of them in a dense model.
    """
    parts = []
    if "routing/load_max" in record:
        parts.append(f"load {record['routing/load_max']:.2f}x{_whose(record)}")
        if "routing/rank_load_max" in record:
            parts.append(f"ranks {record['routing/rank_load_max']:.2f}x")
        if record["routing/unused"]:
            parts.append(f"unused {100 * record['routing/unused']:.0f}%")
    if "routing/effective_experts" in record:
        parts.append(f"experts {record['routing/effective_experts']:.1f}")
    if record.get("routing/dominated"):
        parts.append(f"a>=.5 {100 * record['routing/dominated']:.0f}%")
    if record.get("routing/dropped"):
        parts.append(f"dropped {100 * record['routing/dropped']:.1f}%")
    if "routing/effective_neighbours" in record:
        parts.append(f"neighbours {record['routing/effective_neighbours']:.1f}")
    if "fluctuation/top1" in record:
        parts.append(f"changed {100 * record['fluctuation/top1']:.1f}%")
    return parts


def _whose(record: dict[str, Any]) -> str:
    """Which expert of which layer is the busiest of all, of a sparse one."""
    loads = {
        name: value
        for name, value in record.items()
        if name.startswith("routing/") and name.endswith("/load_max") and name.count("/") > 1
    }
    layer = max(loads, key=lambda name: loads[name], default="").removesuffix("/load_max")
    if f"{layer}/busiest" not in record:
        return ""
    block = next((part for part in layer.split(".") if part.isdecimal()), "")
    return f" (block {block}, expert {record[f'{layer}/busiest']})"
