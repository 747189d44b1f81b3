"""Layouts of a run: which is fastest on a number of GPUs, and how one scales to more.

Weak scaling keeps the work per GPU constant; strong scaling keeps the total work constant.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from polyad.model.decoder import DecoderSettings
from polyad.model.decoder_config import DecoderConfig
from polyad.model.smoe.config import SelectingConfig
from polyad.parallel.dims import Dims
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, config_of
from polyad.train.forecast.forecast import Machines, forecast, predicted_time, with_libraries
from polyad.train.forecast.step import Footprint, footprint

LARGEST_MICRO_BATCH = 128
SHOWN = 5
COMPUTED = ("products", "attention")
"""Useful work of a step."""


class Layout(NamedTuple):
    """A layout with its predicted cost."""

    changes: tuple[str, ...]
    """Changes of the configuration, as `key=value`."""
    config: RunConfig
    dims: Dims
    memory: int
    """Peak bytes of a process."""
    parts: dict[str, float]
    """Seconds of a step by kind of work."""

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return sum(self.parts.values())

    @property
    def why(self) -> str:
        """The largest cost besides products and attention."""
        others = {name: spent for name, spent in self.parts.items() if name not in COMPUTED}
        name, most = max(others.items(), key=lambda each: each[1])
        return f"{most / self.seconds:.0%} {name}"


def changed(config: RunConfig, changes: Sequence[str]) -> RunConfig:
    """Returns the configuration with other values; raises if it becomes invalid."""
    return config_of(config.model_dump(mode="json"), changes, origin="the plan")


def what_would_fit(
    config: RunConfig, machines: Machines, *, imbalance: float = 1.0
) -> list[tuple[str, int]]:
    """Finds single changes with which a run fits into memory, with the resulting bytes.

    For each key the value nearest to the current one is returned."""
    found: list[tuple[str, int]] = []
    for change in _single_changes(config, machines):
        key = change.partition("=")[0]
        if any(other.startswith(f"{key}=") for other, _ in found):
            continue  # a smaller change fits
        try:
            other = changed(config, [change])
            dims = validate(other, machines.processes)
        except ValueError:
            continue
        plan = forecast(other, dims, machines, imbalance=imbalance)
        if plan["fits"]:
            found.append((change, plan["memory_bytes"]["total"]))
    return found


def _single_changes(config: RunConfig, machines: Machines) -> Iterator[str]:
    micro = config.train.micro_batch_size
    while micro > 1:
        micro //= 2
        yield f"train.micro_batch_size={micro}"
    if getattr(config.model, "recompute", None) == "none":
        yield "model.recompute=block"
    for stage in range(config.parallel.zero_stage + 1, 4):
        yield f"parallel.zero_stage={stage}"
    for key in ("tensor_parallel_size", "expert_parallel_size"):
        degree = 2 * getattr(config.parallel, key)
        while degree <= machines.processes_per_node:
            yield f"parallel.{key}={degree}"
            degree *= 2


def fastest_layouts(
    config: RunConfig,
    machines: Machines,
    *,
    imbalance: float = 1.0,
    told: Callable[[float], None] = lambda share: None,
) -> list[Layout]:
    """Tries degrees within a node, ZeRO stages, recomputation and micro-batches.

    The cost of the whole model is extrapolated from two shallow ones, since each block costs the
    same. For each pair of degrees the largest micro-batch that fits is used, with the least effort:
    no recomputation before some, a lower stage before a higher one.

    Args:
        config: The configuration; its global batch and model are kept.
        machines: The machines.
        imbalance: See `forecast`.
        told: Called with the share done.

    Returns:
        Layouts that fit, the fastest first.
    """
    degrees = list(_degrees(config, machines))
    found = []
    for number, changes in enumerate(degrees):
        best = _best_of(config, changes, machines, imbalance)
        if best is not None:
            found.append(best)
        told((number + 1) / len(degrees))
    return sorted(found, key=lambda each: each.seconds)


def _degrees(config: RunConfig, machines: Machines) -> Iterator[tuple[str, ...]]:
    powers = [1 << n for n in range(machines.processes_per_node.bit_length())]
    sparse = isinstance(config.model.known_feed_forward(), SelectingConfig)
    for tensor, expert in product(powers, powers if sparse else [1]):
        if tensor * expert <= machines.processes_per_node:
            changes: tuple[str, ...] = (
                f"parallel.tensor_parallel_size={tensor}",
                f"parallel.expert_parallel_size={expert}",
            )
            # Keys without effect for these degrees would be rejected.
            if tensor == 1 and config.parallel.sequence_parallel:
                changes += ("parallel.sequence_parallel=false",)
            yield changes


def _best_of(
    config: RunConfig, degrees: tuple[str, ...], machines: Machines, imbalance: float
) -> Layout | None:
    """The fastest fitting layout with these degrees."""
    modes = ["none", "block"] if hasattr(config.model, "recompute") else [None]
    stages = sorted({config.parallel.zero_stage, 1, 2, 3})
    for stage, mode in product(stages, modes):
        changes = (*degrees, f"parallel.zero_stage={stage}")
        changes += (f"model.recompute={mode}",) if mode else ()
        fitting = [
            layout
            for layout in _with_micro_batches(config, changes, machines, imbalance)
            if layout.memory <= machines.device.memory
        ]
        if fitting:
            return min(fitting, key=lambda each: each.seconds)
    return None


def _with_micro_batches(
    config: RunConfig, changes: tuple[str, ...], machines: Machines, imbalance: float
) -> Iterator[Layout]:
    """Yields the layouts with each micro-batch size, until one does not fit."""
    micro = 1
    while micro <= LARGEST_MICRO_BATCH:
        every = (*changes, f"train.micro_batch_size={micro}")
        micro *= 2
        try:
            other = changed(config, every)
            dims = validate(other, machines.processes)
        except ValueError:
            continue
        layout = tried(other, dims, every, machines, imbalance)
        yield layout
        if layout.memory > machines.device.memory:
            return


def tried(
    config: RunConfig, dims: Dims, changes: tuple[str, ...], machines: Machines, imbalance: float
) -> Layout:
    """Predicts the whole model from two shallow ones."""
    layers = config.model.model_dump().get("num_layers", 0)  # not every model has blocks
    repeated = _repeated(config, layers)
    if repeated is None:
        return _measured(config, dims, changes, machines, imbalance)
    few, more = repeated
    first, second = (
        _measured(_with_layers(config, number), dims, changes, machines, imbalance)
        for number in (few, few + more)
    )
    blocks = (layers - few) / more

    def whole(of_few: float, of_more: float) -> float:
        of_all: float = of_few + blocks * (of_more - of_few)
        return max(0.0, of_all)

    return Layout(
        changes,
        config,
        dims,
        round(whole(first.memory, second.memory)),
        {
            name: whole(first.parts.get(name, 0.0), second.parts.get(name, 0.0))
            for name in first.parts | second.parts
        },
    )


def _repeated(config: RunConfig, layers: int) -> tuple[int, int] | None:
    """Returns the number of blocks of a shallow model, and of further blocks that repeat.

    None if they hardly repeat, or patterns name some of them.

    Args:
        config: A run's configuration.
        layers: Its number of blocks.
    """
    lora = config.adapt.lora
    patterns = [group.match for group in config.optimizer.groups]
    patterns += [] if lora is None else [*lora.targets, *lora.trained]
    if any(re.search(r"[\d?\[]", pattern) for pattern in patterns):
        return None
    if isinstance(config.model, DecoderSettings) and config.model.replaced is not None:
        return None
    kinds = [
        (*(each.routes(block) for each in _selecting(config).values()), _slides(config, block))
        for block in range(layers)
    ]
    found = []
    for period in range(1, layers // 2 + 1):
        # Number of blocks up to the last one that differs from the one a period later.
        start = next(
            (b + 1 for b in range(layers - period - 1, -1, -1) if kinds[b] != kinds[b + period]), 0
        )
        found.append((start + 2 * period, 2 * period))
    few, more = min(found, default=(layers, 1))
    return (few, more) if few + more < layers else None


def _selecting(config: RunConfig) -> dict[str, SelectingConfig]:
    """The sections of feed-forwards with experts in some blocks, by key."""
    sections = config.model.feed_forwards()
    return {key: each for key, each in sections.items() if isinstance(each, SelectingConfig)}


def _slides(config: RunConfig, block: int) -> bool:
    """Whether a block has a sliding window."""
    model = config.model
    if not isinstance(model, DecoderConfig) or model.sliding_window is None:
        return False
    return model.slides(block)


def _with_layers(config: RunConfig, layers: int) -> RunConfig:
    """Returns the configuration with fewer blocks, and lists of blocks shortened accordingly."""
    lists = {
        f"{key}.{each.placement_key}": getattr(each, each.placement_key)
        for key, each in _selecting(config).items()
    }
    if isinstance(config.model, DecoderConfig):
        lists["model.sliding_window_blocks"] = config.model.sliding_window_blocks
    left = [
        f"{key}={[block for block in blocks if block < layers]}"
        for key, blocks in lists.items()
        if isinstance(blocks, list)
    ]
    return changed(config, [f"model.num_layers={layers}", *left])


def _measured(
    config: RunConfig, dims: Dims, changes: tuple[str, ...], machines: Machines, imbalance: float
) -> Layout:
    found: Footprint = footprint(config, dims, imbalance=imbalance, on_gpu=True)
    spent = predicted_time(config, dims, machines, found)
    parts: dict[str, float] = {
        "products": spent.products,
        "attention": spent.attention,
        "memory-bound operations": spent.memory,
        "waiting for the host": spent.idle,
        **{f"communication among {axis} processes": s for axis, s in spent.exposed.items()},
    }
    memory = sum(with_libraries(found.memory, machines.device).values())
    return Layout(changes, config, dims, memory, parts)


def layout_rows(found: Sequence[Layout], config: RunConfig) -> list[dict[str, Any]]:
    """Formats the fastest layouts for a result, with the changes that they need."""
    now = config.model_dump(mode="json")
    units = config.train.global_batch_size * config.model.units_per_sample()
    rows = []
    for layout in found[:SHOWN]:
        needed = [change for change in layout.changes if not _is_so(now, change)]
        rows.append(
            {
                "change": needed,
                "memory_bytes": layout.memory,
                "step_seconds": layout.seconds,
                "units_per_second": units / layout.seconds,
                "why": layout.why,
            }
        )
    return rows


def _is_so(tree: Any, change: str) -> bool:
    path, _, value = change.partition("=")
    for key in path.split("."):
        tree = tree[key]
    return (str(tree).lower() if isinstance(tree, bool) else str(tree)) == value


MOST = 1024
"""Number of processes of the largest prediction."""


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
        config: Configuration of the run on `machines`, whose degrees are kept. Weak scaling keeps
            the samples per process and step; strong scaling keeps the global batch, and lowers the
            micro-batch where gradient accumulation is exhausted.
        machines: The machines.
        imbalance: See `forecast`.
        most: Number of processes of the last prediction.
        told: Called with the share done.

    Returns:
        For `weak` and `strong` a point for each number of processes: `processes`,
        `units_per_second`, `step_seconds`, `efficiency` (throughput per process relative to the
        first point), `memory_bytes`, `fits`, and `why`, the largest cost besides products.
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
    """Returns changes of a configuration's batch sizes for another number of processes.

    Args:
        config: Configuration of a run on `base` processes.
        processes: The new number of processes.
        base: The original number of processes.

    Returns:
        Values of keys for `weak`, which keeps the samples per process and step, and `strong`, which
        keeps the global batch; a kind that leaves a process without samples is omitted.
    """
    train = config.train
    ranks = processes // config.parallel.tensor_parallel_size
    found: dict[str, tuple[str, ...]] = {}
    weak = train.global_batch_size * processes // base
    if weak:
        micro = min(train.micro_batch_size, max(1, weak // ranks))
        found["weak"] = (f"train.global_batch_size={weak}", f"train.micro_batch_size={micro}")
    micro = min(train.micro_batch_size, train.global_batch_size // ranks)
    if micro:
        found["strong"] = (f"train.micro_batch_size={micro}",)
    return found
