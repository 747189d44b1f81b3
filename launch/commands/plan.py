"""`polyad plan`: what a run takes on every layout, before any of it is paid for."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyad.launch.command import (
    ConfigOrFolder,
    Json,
    Overrides,
    Positive,
    UsageError,
    check_json_path,
    command,
    results,
)
from polyad.train.errors import ConfigError

if TYPE_CHECKING:
    from polyad.train.config.run import RunConfig
    from polyad.train.plan import Footprint

LAYOUT = {
    "tp": "tensor_parallel_size",
    "ep": "expert_parallel_size",
    "sp": "sequence_parallel",
    "zero": "zero_stage",
}
"""Names in `--layout`, and their keys of `parallel`."""


@command(
    "plan",
    "polyad plan configs/gpt2/124m-smoe-64.yaml --processes-per-node 8 model.vocab_size=50257",
    "polyad plan configs/gpt2/124m-smoe-64.yaml --nodes 2 --layout tp=2,ep=4,zero=2 "
    "model.vocab_size=50257",
)
def plan(
    config: ConfigOrFolder,
    overrides: Overrides,
    *,
    nodes: Positive = 1,
    processes_per_node: Positive = 8,
    layout: str | None = None,
    json: Json = None,
) -> None:
    """Lists what a run takes on every layout: memory, traffic, FLOPs.

    Needs no GPU. A line has the parameters of a process, its memory by part, what it sends in a
    step to each group, and its FLOPs. Parameters, gradients and optimizer states are exact. No time
    is predicted.

    Args:
        nodes: number of hosts; default 1.
        processes_per_node (P): processes per host, one for each GPU; default 8.
        layout (LAYOUT): one layout in detail, as tp=2,ep=4,sp=1,zero=2: tensor and expert parallel
            size, sequence parallel, ZeRO stage; what is left out is as in the configuration.
    """
    from polyad.train.config.rules import validate
    from polyad.train.plan import flops_per_step, footprint, layouts

    check_json_path(json)
    processes = nodes * processes_per_node
    words = [] if layout is None else [f"parallel.{key}" for key in _keys(layout)]
    settings = configuration(config, [*overrides, *words], processes, check=layout is not None)
    with results(json) as show:
        if layout is not None:
            plans = [(settings, footprint(settings, validate(settings, processes)))]
        else:
            plans = list(layouts(settings, processes))
        if not plans:
            raise ConfigError(
                f"train.global_batch_size: {settings.train.global_batch_size} in micro-batches of "
                f"{settings.train.micro_batch_size} fits no layout of {processes} processes"
            )
        flops = flops_per_step(settings)
        rows = [_row(each, takes, processes) for each, takes in plans]
        result: dict[str, Any] = {
            "processes": processes,
            "micro_batch_size": settings.train.micro_batch_size,
            "global_batch_size": settings.train.global_batch_size,
            "flops_per_step": flops,
            "layouts": rows,
        }
        in_detail, compiled = layout is not None, settings.model.compile
        show(result, _table(result, in_detail=in_detail, compiled=compiled))


def _keys(layout: str) -> list[str]:
    """Overrides of `parallel` of a layout.

    Raises:
        UsageError: it is not one.
    """
    keys = []
    for part in layout.split(","):
        name, _, value = part.partition("=")
        if name not in LAYOUT or not value.isdecimal():
            raise UsageError(
                f"--layout: {part} is not allowed; a layout is like tp=2,ep=4,sp=1,zero=2"
            )
        keys.append(f"{LAYOUT[name]}={bool(int(value)) if name == 'sp' else int(value)}")
    return keys


def configuration(
    path: Path, overrides: Sequence[str], processes: int, *, check: bool = True
) -> "RunConfig":
    """The configuration with what its data decides; no data is needed if it says all itself.

    Args:
        path: a configuration, or a folder of weights.
        overrides: `key=value`.
        processes: number of processes.
        check: whether its own layout must fit the processes.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    from polyad.train.config.rules import validate
    from polyad.train.describe import check_without_data
    from polyad.train.reading import config_at
    from polyad.train.start import open_plan

    config = config_at(path, overrides, processes)
    if check:
        validate(config, processes)
    if not config.model.left_to_data():
        return config
    try:
        return open_plan(path, overrides, processes).config
    except ValueError as error:
        try:
            check_without_data(config)
        except ConfigError as missing:
            raise ConfigError(f"{missing} ({error})") from None
        raise


def _row(config: "RunConfig", needs: "Footprint", processes: int) -> dict[str, Any]:
    """JSON values of one layout."""
    parallel = config.parallel
    return {
        "data_parallel_size": processes // parallel.tensor_parallel_size,
        **{key: getattr(parallel, key) for key in LAYOUT.values()},
        "parameters": needs.parameters,
        "memory_bytes": needs.memory | {"total": needs.total},
        "held_bytes": needs.states,
        "sent_bytes": needs.sent,
    }


def _table(result: dict[str, Any], *, in_detail: bool, compiled: bool) -> str:
    """The result for a person."""
    from polyad.train.results import aligned, counted, in_bytes

    parts = list(result["layouts"][0]["memory_bytes"])
    sent = list(result["layouts"][0]["sent_bytes"])
    rows = [["layout", "parameters", *parts, *(f"sent, {key}" for key in sent)]]
    for each in result["layouts"]:
        sizes = [each["memory_bytes"][part] for part in parts]
        sizes += [each["sent_bytes"][key] for key in sent]
        rows.append([_name(each), f"{each['parameters']:,}", *map(in_bytes, sizes)])
    if in_detail:
        rows = [*map(list, zip(*rows, strict=True))]
    processes, flops = result["processes"], result["flops_per_step"]
    lines = [
        *aligned(rows),
        "",
        f"{counted(processes, 'process')}, micro-batches of {result['micro_batch_size']}, "
        f"{result['global_batch_size']} samples and {flops:.3g} FLOPs per step, "
        f"{flops / processes:.3g} of each process",
        "memory and traffic are of one process and one step; CUDA and its allocator take about "
        "2 GB and 5% more",
    ]
    if not in_detail and compiled:
        lines.append("layouts with ZeRO 3 need model.compile=false")
    return "\n".join(lines)


def _name(layout: dict[str, Any]) -> str:
    """Names a layout, as in `dp=4 tp=2 ep=2 zero=1`."""
    short = {"dp": "data_parallel_size", **LAYOUT}
    sizes = {name: int(layout[key]) for name, key in short.items()}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size or name != "sp")
