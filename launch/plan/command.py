"""`polyad plan`: what a run would take and cost, before any of it is paid for."""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyad.launch.arguments.runs import PLANNED
from polyad.launch.machine import end_with_launcher, prepare_environment, share_cores
from polyad.launch.parser import UsageError
from polyad.launch.via.agent import STANDALONE
from polyad.train.errors import ConfigError

if TYPE_CHECKING:
    from polyad.train.config.run import RunConfig
    from polyad.train.forecast.forecast import Machines

HERE = "cpu-here"
RANGES = (("imbalance", 1.0, 100.0), ("storage", 1e-3, 1e6), ("failures", 1.0, 1e9))
"""What numbers may be."""


def device_names() -> list[str]:
    """What `--device` takes."""
    from polyad.parallel.plan.devices import DEVICES

    return [*DEVICES, HERE]


def configuration(path: Path, overrides: Sequence[str], processes: int) -> "RunConfig":
    """The configuration with what its data decides; no data is needed if it says all itself.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    from polyad.train.config.plan import open_inputs
    from polyad.train.config.rules import validate
    from polyad.train.config.run import load_config
    from polyad.train.forecast.describe import check_without_data

    config = load_config(path, overrides)
    validate(config, processes)
    if not config.model.left_to_data():
        return config
    try:
        return open_inputs(path, overrides, processes).config
    except ValueError as error:
        try:
            check_without_data(config)
        except ConfigError as missing:
            raise ConfigError(f"{missing} ({error})") from None
        raise


def plan(
    config: "RunConfig",
    machines: "Machines",
    *,
    imbalance: float = 1.0,
    search: bool = False,
    scale: bool = False,
) -> dict[str, Any]:
    """Predicts a run on GPUs.

    Args:
        config: as `configuration` gave it.
        machines: what it runs on.
        imbalance: rows of experts that the busiest process gets, over the mean of all.
        search: whether to look for the fastest layouts, too.
        scale: whether to predict other numbers of GPUs, too.

    Returns:
        JSON values.
    """
    from polyad.train.config.rules import validate
    from polyad.train.console import Progress
    from polyad.train.forecast.forecast import by_recomputation, forecast
    from polyad.train.forecast.layouts import fastest_layouts, layout_rows, what_would_fit
    from polyad.train.forecast.scale import scaling

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


def check(result: dict[str, Any]) -> None:
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
        f"memory: {in_bytes(memory['total'])} a process is not allowed with the "
        f"{in_bytes(memory['device'])} of {name}; "
        + (f"what would fit: {', '.join(ways)}" if ways else "no single change would fit: --search")
    )


def check_options(options: Namespace) -> None:
    """Checks options before any work is done.

    Raises:
        UsageError: some are out of range, or do not go together.
    """
    device = options.device
    if device not in device_names():
        raise UsageError(f"--device: {device} is not allowed: {', '.join(device_names())}")
    for name, least, most in RANGES:
        value = getattr(options, name)
        if not least <= value <= most:  # NaN is not, either
            raise UsageError(f"--{name}: {value:g} is not allowed, {least:g} to {most:g} are")
    if device != HERE:
        if options.check:
            raise UsageError(f"--check: is not allowed with --device {device}; {HERE} is")
        return
    if options.nodes != 1:
        raise UsageError(
            f"--nodes: {options.nodes} is not allowed with --device {HERE}, this machine: 1"
        )
    for name in ("search", "figure"):
        if getattr(options, name):
            raise UsageError(f"--{name}: is not allowed with --device {HERE}, which is one layout")
    for name, usual in PLANNED.items():
        if getattr(options, name) != usual:
            raise UsageError(
                f"--{name}: {getattr(options, name):g} is not allowed with --device {HERE}"
            )


def become_processes(options: Namespace) -> None:
    """Replaces this process by torchrun, which starts `polyad plan` in each of P processes."""
    prepare_environment()
    processes = options.processes_per_node
    share_cores(processes)
    sys.stdout.flush()
    sys.stderr.flush()
    words = [str(options.config), "--device", HERE, "--processes-per-node", str(processes)]
    for name in ("json", "check"):
        if getattr(options, name):
            words += [f"--{name}", str(getattr(options, name))]
    os.execv(
        sys.executable,
        [
            *(sys.executable, "-m", "polyad.launch.torchrun", *STANDALONE),
            *("--nproc-per-node", str(processes), "-m", "polyad.launch", "plan"),
            *(*words, *options.overrides),
        ],
    )


def plan_here(
    config: "RunConfig", processes: int, *, check_steps: int = 0
) -> dict[str, Any] | None:
    """Predicts a run on this machine, by timing its operations; all processes call it.

    Args:
        config: as `configuration` gave it.
        processes: of the run.
        check_steps: steps that are really done after it, to say how far off the prediction is.

    Returns:
        JSON values on rank 0; None on the others.
    """
    end_with_launcher()
    prepare_environment()
    from polyad.train.forecast.here import forecast_here

    return forecast_here(config, processes, check_steps=check_steps)
