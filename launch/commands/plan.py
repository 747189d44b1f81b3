"""`polyad plan`: what a run would take and cost, before any of it is paid for."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from polyad.data.files import write_whole
from polyad.launch.command import (
    Argument,
    ConfigOrFolder,
    Json,
    Overrides,
    UsageError,
    command,
    positive,
)
from polyad.launch.machine import end_with_launcher, prepare_environment
from polyad.launch.output import check_json_path, check_result_file, results
from polyad.train.errors import ConfigError

if TYPE_CHECKING:
    from polyad.train.config.run import RunConfig
    from polyad.train.forecast.forecast import Machines

HERE = "cpu-here"
IMBALANCE, STORAGE, FAILURES = 1.0, 2.0, 50_000.0
"""What is assumed unless it is told."""
RANGES = {
    "imbalance": (IMBALANCE, 1.0, 100.0),
    "storage": (STORAGE, 1e-3, 1e6),
    "failures": (FAILURES, 1.0, 1e9),
}
"""What numbers usually are, at least and at most."""


@command(
    "plan",
    "polyad plan configs/gpt2/124m.yaml --processes-per-node 8 --device h100 "
    "model.vocab_size=50257",
    "polyad plan configs/gpt2/124m-smoe-64.yaml --nodes 2 --search model.vocab_size=50257 "
    "model.num_layers=4",
    "polyad plan configs/quickstart/gpt2-smoe.yaml --device cpu-here --processes-per-node 2 "
    "--check 3 data.path=runs/stdlib",
)
def plan(
    config: ConfigOrFolder,
    overrides: Overrides,
    *,
    nodes: Annotated[int, Argument("number of hosts; default 1", "N", positive)] = 1,
    processes_per_node: Annotated[
        int, Argument("processes per host, one for each GPU; default 8", "P", positive)
    ] = 8,
    device: Annotated[
        str,
        Argument(
            "a100-80gb, h100, h200 or b200, in the vendor's standard nodes; or cpu-here, which "
            "times every operation on this machine; default a100-80gb",
            "NAME",
        ),
    ] = "a100-80gb",
    imbalance: Annotated[
        float,
        Argument(
            "expert load imbalance: rows on the busiest process, divided by the mean over "
            "processes; default 1",
            "X",
        ),
    ] = IMBALANCE,
    storage: Annotated[
        float,
        Argument(
            "storage bandwidth of a node in GB/s, for writing checkpoints and reading weights; "
            "default 2",
            "GB",
        ),
    ] = STORAGE,
    failures: Annotated[
        float,
        Argument(
            "mean time between failures of one GPU, including its share of the node, in hours; "
            "default 50,000",
            "HOURS",
        ),
    ] = FAILURES,
    search: Annotated[
        bool, Argument("also search for the fastest layouts on the same number of GPUs")
    ] = False,
    figure: Annotated[
        Path | None,
        Argument("also predict the scaling up to 1,024 GPUs, and plot it in FILE (.svg)", "FILE"),
    ] = None,
    check: Annotated[
        int | None,
        Argument(
            "with --device cpu-here: also run this many steps, and report the error of the "
            "prediction",
            "STEPS",
            positive,
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Predicts memory, communication and time of a run on GPUs; searches for fast layouts."""
    from polyad.launch.agent import become_processes
    from polyad.launch.plan import figure as drawn
    from polyad.launch.plan import table
    from polyad.parallel.comm import environment_world_size
    from polyad.parallel.plan.devices import DEVICES
    from polyad.train.forecast.forecast import Machines

    check_json_path(json)
    if figure:
        check_result_file("--figure", figure, (".svg",))
    assumed = {"imbalance": imbalance, "storage": storage, "failures": failures}
    asked = {"search": search, "figure": figure}
    _check(device, nodes, check, assumed, [name for name, value in asked.items() if value])
    processes = nodes * processes_per_node
    known = configuration(config, overrides, processes)
    if device == HERE:
        if processes > 1 and environment_world_size() == 1:
            words = ["plan", str(config), "--device", HERE]
            words += ["--processes-per-node", str(processes)]
            words += ["--json", json] if json else []
            words += ["--check", str(check)] if check else []
            become_processes([*words, *overrides], processes)
        end_with_launcher()
        prepare_environment()
        from polyad.train.forecast.measured import forecast_here

        with results(json) as show:
            here = forecast_here(known, processes, check_steps=check or 0)
            if here is not None:
                _add_reading(here, known, config, None)
                show(here, table(here))
        return
    machines = Machines(
        device=DEVICES[device],
        nodes=nodes,
        processes_per_node=processes_per_node,
        storage=1e9 * storage,
        hours_of_one=failures,
    )
    with results(json) as show:
        scale = figure is not None
        result = _on_gpus(known, machines, imbalance=imbalance, search=search, scale=scale)
        _add_reading(result, known, config, machines)
        if figure:
            write_whole(figure, drawn(result))
        show(result, table(result))
        _check_memory(result)


def _check(
    device: str, nodes: int, steps: int | None, assumed: dict[str, float], given: list[str]
) -> None:
    """Checks options before any work is done.

    Args:
        device: `--device`.
        nodes: `--nodes`.
        steps: `--check`.
        assumed: what is assumed of machines, by option.
        given: options that were given and are of GPUs alone.

    Raises:
        UsageError: some are out of range, or do not go together.
    """
    from polyad.parallel.plan.devices import DEVICES

    names = [*DEVICES, HERE]
    if device not in names:
        raise UsageError(f"--device: {device} is not allowed: {', '.join(names)}")
    for name, value in assumed.items():
        _, least, most = RANGES[name]
        if not least <= value <= most:  # NaN is not, either
            raise UsageError(
                f"--{name}: {value:g} is not allowed; it must be from {least:g} to {most:g}"
            )
    if device != HERE:
        if steps:
            raise UsageError(f"--check: is not allowed with --device {device}; allowed: {HERE}")
        return
    if nodes != 1:
        raise UsageError(f"--nodes: {nodes} is not allowed with --device {HERE}, this machine: 1")
    if given:
        raise UsageError(f"--{given[0]}: is not allowed with --device {HERE}, which is one layout")
    for name, value in assumed.items():
        if value != RANGES[name][0]:
            raise UsageError(f"--{name}: {value:g} is not allowed with --device {HERE}")


def configuration(path: Path, overrides: Sequence[str], processes: int) -> "RunConfig":
    """The configuration with what its data decides; no data is needed if it says all itself.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    from polyad.train.config.plan import open_plan
    from polyad.train.config.rules import validate
    from polyad.train.forecast.describe import check_without_data
    from polyad.train.reading import config_at

    config = config_at(path, overrides, processes)
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


def _on_gpus(
    config: "RunConfig",
    machines: "Machines",
    *,
    imbalance: float,
    search: bool,
    scale: bool,
) -> dict[str, Any]:
    """Predicts a run; whether to look for layouts and other numbers of GPUs, too, is asked for."""
    from polyad.train.config.rules import validate
    from polyad.train.console import Progress
    from polyad.train.forecast.forecast import by_recomputation, forecast
    from polyad.train.forecast.layouts import fastest_layouts, layout_rows, scaling, what_would_fit

    prepare_environment()
    dims = validate(config, machines.processes)
    result = forecast(config, dims, machines, imbalance=imbalance)
    result["recompute"] = by_recomputation(config, dims, machines, imbalance=imbalance)
    if not result["fits"]:
        found = what_would_fit(config, machines, imbalance=imbalance)
        result["would_fit"] = [{"change": c, "memory_bytes": size} for c, size in found]
    if search:
        told = Progress("layouts", 100, "%")
        layouts = fastest_layouts(config, machines, imbalance=imbalance, told=told)
        result["layouts"] = layout_rows(layouts, config)
    if scale:
        told = Progress("numbers of GPUs", 100, "%")
        result["scaling"] = scaling(config, machines, imbalance=imbalance, told=told)
    return result


def _add_reading(
    result: dict[str, Any], config: "RunConfig", path: Path, machines: "Machines | None"
) -> None:
    """Adds to the plan of a folder what evaluating and measuring take with it."""
    if not path.is_dir():
        return
    from polyad.train.console import Progress
    from polyad.train.forecast.reading import reading

    told = Progress("operations of a reading", 100, "%") if machines is None else lambda share: None
    if (found := reading(config, path, machines, told)) is not None:
        result["reading"] = found


def _check_memory(result: dict[str, Any]) -> None:
    """Ends the command with status 2 if the run does not fit the memory.

    Raises:
        ConfigError: it does not; the line says what would.
    """
    if result["fits"]:
        return
    from polyad.train.console import in_bytes

    memory, name = result["memory_bytes"], result["layout"]["device"]
    ways = [f"{each['change']} ({in_bytes(each['memory_bytes'])})" for each in result["would_fit"]]
    raise ConfigError(
        f"memory: {in_bytes(memory['total'])} per process does not fit into the "
        f"{in_bytes(memory['device'])} of {name}; "
        + (
            f"what would fit: {', '.join(ways)}"
            if ways
            else "no single change makes it fit: use --search"
        )
    )
