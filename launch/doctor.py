"""`polyad doctor`: whether hosts are equal, share a folder, and reach each other fast enough."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyad.data.files import temporary_folder
from polyad.parallel.comm import comparison
from polyad.train.errors import RunError, one_line
from polyad.train.results import aligned, in_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from polyad.parallel.comm import World
    from polyad.train.config.run import RunConfig

SLOW_LINK = 0.5
"""Links below this share of the usual speed are reported."""
SENT, REPEATS = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}, 3
"""Bytes that a rank sends in a measurement, by device; and the number of repetitions."""


class Link(NamedTuple):
    """A measured link, in bytes per second in each direction."""

    one: int
    """Rank of one end."""
    other: int
    """Rank of the other end."""
    bytes_per_second: float


Facts = dict[str, Any]
"""JSON values about one process: `host`, `node`, `local_rank`, `device`; `agreed`, facts that must
be the same everywhere; `data_error`, why data cannot be read, or None; and of a run its `folder`:
whether this process has `seen` what rank 0 has written there and after how many `seconds`, or the
`error` for which rank 0 cannot write there."""


class Finding(NamedTuple):
    """Something to know before a run."""

    breaks: bool
    """Whether it would make a run fail, or change its results."""
    text: str


def examine(config: Path | None, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Examines all hosts of this group of processes; all call this.

    Args:
        config: a run's configuration; None: only the machines.
        overrides: `key=value`.

    Returns:
        On rank 0 JSON values: the number of `processes`, the `seconds` that it took, the facts of
        all `ranks`, the measured `links` between the first processes of hosts, or on one host
        between its processes, and lines of `errors` and `warnings`. None on other ranks.

    Raises:
        ValueError: with an `exit_status` of 2: the configuration is wrong.
    """
    from polyad.parallel import comm
    from polyad.train.config.run import load_config

    begun = time.monotonic()
    run = None if config is None else load_config(config, overrides)
    world = comm.initialize(timeout_minutes=2.0)
    facts = _named_apart(comm.from_all(_facts_of(run, world)))
    links = measure(world, [each["host"] for each in facts])
    comm.shutdown()
    if not world.is_main:
        return None
    problems = list(findings(facts, links))
    return {
        "processes": world.size,
        "seconds": time.monotonic() - begun,
        "ranks": facts,
        "links": [[*link] for link in links],
        "errors": [each.text for each in problems if each.breaks],
        "warnings": [each.text for each in problems if not each.breaks],
    }


def _facts_of(config: "RunConfig | None", world: "World") -> Facts:
    import torch

    from polyad.train.config.environment import agreed_facts
    from polyad.train.tasks.registry import open_task

    data_error = None
    try:
        agreed = agreed_facts(config, None if config is None else open_task(config.for_task()))
    except (ValueError, OSError) as error:
        agreed, data_error = agreed_facts(config, None), one_line(error)
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    facts = {
        "host": socket.gethostname(),
        "node": int(os.environ.get("GROUP_RANK", "0")),
        "local_rank": world.local_rank,
        "device": device,
        "agreed": agreed,
        "data_error": data_error,
    }
    if config is not None:
        facts["folder"] = _shared_folder(config.run.folder, world)
    return facts


def _named_apart(facts: Sequence[Facts]) -> list[Facts]:
    """Adds node numbers to the names of hosts with equal names."""
    nodes: dict[str, set[int]] = {}
    for each in facts:
        nodes.setdefault(each["host"], set()).add(each["node"])
    return [
        {**each, "host": f"{each['host']} (node {each['node']})"}
        if len(nodes[each["host"]]) > 1
        else each
        for each in facts
    ]


def _shared_folder(run_folder: str, world: "World") -> Facts:
    """Tests whether hosts see a file of rank 0 beside a run's folder; all processes call this."""
    from polyad.parallel import comm
    from polyad.train.guard.run_folder import seen_in_time

    with contextlib.ExitStack() as stack:
        place, reason = Path(), ""
        if world.is_main:
            parent = Path(run_folder).absolute().parent
            try:
                place = stack.enter_context(temporary_folder(".polyad-doctor-", parent))
            except OSError as error:
                reason = f"{error.filename or run_folder}: {error.strerror}"
        place, reason = comm.from_main((place, reason))
        if reason:
            return {"error": f"run.folder: {run_folder}: cannot be written to: {reason}"}
        file = place / "seen"
        if world.is_main:
            file.write_text("x")
        comm.barrier()
        begun = time.monotonic()
        seen = seen_in_time(file.exists)
        comm.barrier()
        return {"seen": seen, "seconds": time.monotonic() - begun if seen else None}


def measure(world: "World", hosts: Sequence[str]) -> list[Link]:
    """Measures the links between the first ranks of hosts, or of one host between its ranks.

    It takes a few seconds; all ranks call it together.

    Args:
        world: this rank.
        hosts: the host of each rank.
    """
    import torch

    from polyad.parallel import comm

    first = {host: rank for rank, host in reversed([*enumerate(hosts)])}
    members = sorted(first.values()) if len(first) > 1 else list(range(world.size))
    buffers = torch.zeros(2, SENT[world.device.type], dtype=torch.uint8, device=world.device)
    mine = []
    for pairs in rounds(members):
        comm.barrier()
        mine += [_link(world, *pair, buffers) for pair in pairs if world.rank in pair]
    both_ends = [link for links in comm.from_all(mine) for link in links]
    return sorted({link[:2]: link for link in both_ends}.values())


def rounds(members: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Pairs each member with each other one once; every member is in at most one pair per round.

    Source: the circle method of round-robin tournaments.

    Args:
        members: distinct numbers.

    Returns:
        n - 1 rounds of pairs for an even number of members n, n for an odd one.
    """
    circle: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _link(world: "World", one: int, other: int, buffers: "Tensor") -> Link:
    from polyad.parallel import comm

    peer = other if world.rank == one else one
    comm.exchange_with(peer, *buffers)  # connects
    begun = time.perf_counter()
    for _ in range(REPEATS):
        comm.exchange_with(peer, *buffers)
    return Link(one, other, REPEATS * buffers[0].numel() / (time.perf_counter() - begun))


def findings(facts: Sequence[Facts], links: Sequence[Link]) -> Iterator[Finding]:
    """Yields the problems.

    Args:
        facts: facts of each rank.
        links: see `examine`.
    """
    # If data cannot be read, which is a separate finding, its contents are unknown.
    good: dict[str, str] = next((each["agreed"] for each in facts if not each["data_error"]), {})
    of_ranks = [
        (each["host"], {**(good if each["data_error"] else {}), **each["agreed"]}) for each in facts
    ]
    yield from (Finding(True, line) for line in comparison(of_ranks))
    kinds = [(each["host"], {"the device": each["device"]}) for each in facts]
    yield from (Finding(False, line) for line in comparison(kinds))
    for each in facts:
        if each["local_rank"] == 0 and each["data_error"]:
            yield Finding(True, f"{each['host']}: {each['data_error']}")
    yield from _of_folder(facts)
    yield from _slow_links(facts, links)


def _hosts(ranks: Sequence[int], facts: Sequence[Facts]) -> str:
    """Names the distinct hosts of ranks, at most five."""
    names = list(dict.fromkeys(facts[rank]["host"] for rank in ranks))
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest


def _of_folder(facts: Sequence[Facts]) -> Iterator[Finding]:
    folders = [each["folder"] for each in facts if "folder" in each]  # none without a run
    if folders and (error := folders[0].get("error")):
        yield Finding(True, error)
    elif blind := [rank for rank, each in enumerate(folders) if not each["seen"]]:
        yield Finding(
            True,
            f"run.folder: {_hosts(blind, facts)} cannot see what {facts[0]['host']} writes next to "
            f"it: all hosts need a shared file system",
        )


def _slow_links(facts: Sequence[Facts], links: Sequence[Link]) -> list[Finding]:
    speeds = sorted(link.bytes_per_second for link in links)
    # Not the median, since one bad host of three makes two of three links slow.
    usual = speeds[round(0.75 * (len(speeds) - 1))] if speeds else 0.0
    slow = [link for link in links if link.bytes_per_second < SLOW_LINK * usual]
    ends = [rank for link in links for rank in link[:2]]
    bad = [rank for link in slow for rank in link[:2]]
    # A host with a bad adapter gets one line, not one for each other host.
    culprits = [rank for rank in sorted({*bad}) if 1 < ends.count(rank) == bad.count(rank)]
    lines = []
    for rank in culprits:
        own = [link.bytes_per_second for link in slow if rank in link[:2]]
        lines.append(f"every link of {_place(facts, rank)} is slow: {in_bytes(max(own))}/s")
    for link in slow:
        if not set(link[:2]) & set(culprits):
            both = " and ".join(_place(facts, rank) for rank in link[:2])
            lines.append(f"the link between {both} is slow: {in_bytes(link.bytes_per_second)}/s")
    return [Finding(False, f"{text}, others {in_bytes(usual)}/s") for text in lines]


def _place(facts: Sequence[Facts], rank: int) -> str:
    one_host = len({each["host"] for each in facts}) == 1
    host = facts[rank]["host"]
    return f"process {facts[rank]['local_rank']} of {host}" if one_host else host


def table(result: dict[str, Any]) -> str:
    """Formats the result."""
    by_host: dict[str, list[Facts]] = {}
    for each in result["ranks"]:
        by_host.setdefault(each["host"], []).append(each)
    rows = [("host", "processes", "device")]
    rows += [(host, f"{len(of)}", of[0]["device"]) for host, of in by_host.items()]
    lines = aligned(rows)
    if speeds := [speed for *_, speed in result["links"]]:
        what = "hosts" if len(by_host) > 1 else "processes"
        span = f"{in_bytes(min(speeds))}/s to {in_bytes(max(speeds))}/s"
        lines.append(f"{len(speeds)} links between {what}: {span}")
    lines += [f"error: {text}" for text in result["errors"]]
    lines += [f"warning: {text}" for text in result["warnings"]]
    if not result["errors"]:
        lines.append(f"no problems found ({result['seconds']:.0f} s)")
    return "\n".join(lines)


def check(result: dict[str, Any]) -> None:
    """Ends the command with status 1 if something would break a run.

    Raises:
        RunError: with the number of problems.
    """
    if result["errors"]:
        others = len(result["errors"]) - 1
        more = f", and {others} more" if others else ""
        raise RunError(f"a run would fail or be slow here: {result['errors'][0]}{more}")
