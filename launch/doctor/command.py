"""The command: in each process it looks, and rank 0 says what was found."""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyad.launch.doctor.facts import facts_of, probe_folder, shared_folder_facts
from polyad.launch.doctor.findings import findings
from polyad.train.console import in_bytes
from polyad.train.errors import RunError
from polyad.train.results import aligned

if TYPE_CHECKING:
    from polyad.parallel.comm import World
    from polyad.train.config.run import RunConfig


def examine(config: Path | None, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Looks at all hosts of this group of processes; all call it.

    Args:
        config: of a run; None: the machines alone.
        overrides: `key=value`.

    Returns:
        JSON values on rank 0; None on the others.

    Raises:
        ValueError: with an `exit_status` of 2: the configuration is wrong.
    """
    from polyad.parallel import comm
    from polyad.parallel.probe import measure
    from polyad.train.config.run import load_config

    begun = time.monotonic()
    run = None if config is None else load_config(config, overrides)
    world = comm.initialize(timeout_minutes=2.0)
    mine = facts_of(run, world.local_rank)
    if run is not None:
        mine["folder"] = _folder(run, world)
    facts = named_apart(comm.from_all(mine))
    measured = measure(world, [each["host"] for each in facts])
    room = _room(run, world.size) if run is not None and world.is_main else None
    comm.shutdown()
    if not world.is_main:
        return None
    found = findings(facts, measured, room)
    return {
        "processes": world.size,
        "device": world.device.type,
        "seconds": time.monotonic() - begun,
        "ranks": facts,
        "measured": asdict(measured),
        "errors": [each.text for each in found if each.breaks],
        "warnings": [each.text for each in found if not each.breaks],
    }


def named_apart(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the number of a node in its name, where several are called alike."""
    nodes: dict[str, set[int]] = {}
    for each in facts:
        nodes.setdefault(each["host"], set()).add(each["node"])
    return [
        each | {"host": f"{each['host']} (node {each['node']})"}
        if len(nodes[each["host"]]) > 1
        else each
        for each in facts
    ]


def _folder(config: "RunConfig", world: "World") -> dict[str, Any]:
    from polyad.parallel import comm

    with contextlib.ExitStack() as stack:
        place, reason = "", ""
        if world.is_main:
            try:
                place = str(stack.enter_context(probe_folder(Path(config.run.folder))))
            except OSError as error:
                reason = f"{error.filename or config.run.folder}: {error.strerror}"
        place, reason = comm.from_main((place, reason))
        if reason:
            return {"error": f"run.folder: {config.run.folder}: cannot be written to: {reason}"}
        return shared_folder_facts(Path(place), world)


def _room(config: "RunConfig", processes: int) -> str | None:
    """Why the run's next checkpoints do not fit; None if they do, or nobody knows their size."""
    from polyad.train.config.adaptation import model_of
    from polyad.train.config.plan import checkpoint_bytes
    from polyad.train.config.rules import validate
    from polyad.train.guard.run_folder import check_room
    from polyad.train.tasks.registry import open_task

    try:
        config = config.model_copy(update={"model": open_task(config.for_task()).model})
        validate(config, processes)
        size = checkpoint_bytes(config, model_of(config))
        folder = Path(config.run.folder)
        check_room(folder, config.checkpoint, step=0, steps=config.train.steps, size=size)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def table(result: dict[str, Any]) -> str:
    """The result for a person."""
    ranks, measured = result["ranks"], result["measured"]
    rows: list[tuple[str, ...]] = [("host", "processes", "device", "free", "TFLOP/s", "clock")]
    by_host: dict[str, list[int]] = {}
    for rank, each in enumerate(ranks):
        by_host.setdefault(each["host"], []).append(rank)
    for host, members in by_host.items():
        device = ranks[members[0]]["device"]
        free = min(
            ranks[rank]["device"].get("gpu_memory_free_bytes")
            or ranks[rank]["device"]["memory_free_bytes"]
            for rank in members
        )
        rows.append(
            (
                host,
                f"{len(members)}",
                device.get("gpu", f"{device['cores']} cores"),
                f"{free / 2**30:.1f} GiB",
                f"{min(measured['flops'][rank] for rank in members) / 1e12:.3g}",
                f"{measured['clocks'][members[0]]:+.3f} s",
            )
        )
    lines = [*aligned(rows), *_links(measured)]
    lines += [f"error: {text}" for text in result["errors"]]
    lines += [f"warning: {text}" for text in result["warnings"]]
    if not result["errors"]:
        lines.append(f"nothing found that would break a run ({result['seconds']:.0f} s)")
    return "\n".join(lines)


def _links(measured: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for name in ("all_reduce", "all_to_all"):
        if measured[name] is not None:
            rows.append((name.replace("_", "-"), f"{in_bytes(measured[name])}/s", ""))
    for name, what in (("within", "pairs in a host"), ("between", "pairs of hosts")):
        speeds = [link[2] for link in measured[name]]
        if speeds:
            least, most = (f"{in_bytes(speed)}/s" for speed in (min(speeds), max(speeds)))
            span = f"{least} to {most}" if len(speeds) > 1 else most
            rows.append((what, span, f"{len(speeds)} measured"))
    return aligned(rows) if rows else []


def check(result: dict[str, Any]) -> None:
    """Ends the command with status 1 if something would break a run.

    Raises:
        RunError: the line says how much.
    """
    if result["errors"]:
        others = len(result["errors"]) - 1
        more = f", and {others} more" if others else ""
        raise RunError(f"a run would not go well here: {result['errors'][0]}{more}")


def in_a_group() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ
