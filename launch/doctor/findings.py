"""Evaluates the facts of all processes, and formats the findings."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from polyad.launch.doctor.facts import Facts, SharedFolder, facts_of, named_apart
from polyad.parallel.meeting import comparison
from polyad.parallel.probe import Link, Measured
from polyad.train.console import counted, in_bytes
from polyad.train.errors import RunError
from polyad.train.results import aligned

SLOW_LINK, SLOW_DEVICE = 0.5, 0.8
"""Links and devices below these shares of the usual speed are reported."""
CLOCKS_APART = 1.0
"""Clock difference in seconds that is reported."""
BUSY = 0.5
"""Load by other processes that is reported, as a share of a host's cores."""
FREE_MEMORY = 0.9
"""Share of a GPU's memory that is free unless somebody else uses it."""


class Finding(NamedTuple):
    """Something to know before a run."""

    breaks: bool
    """Whether it would make a run fail, or change its results."""
    text: str


@dataclass(frozen=True)
class Found:
    """Facts about all hosts, and the findings."""

    processes: int
    device: str
    seconds: float
    ranks: list[Facts]
    measured: Measured
    errors: list[str]
    warnings: list[str]


def examine(config: Path | None, overrides: Sequence[str]) -> Found | None:
    """Examines all hosts of this group of processes; all call this.

    Args:
        config: a run's configuration; None: only the machines.
        overrides: `key=value`.

    Returns:
        The result on rank 0; None on other ranks.

    Raises:
        ValueError: with an `exit_status` of 2: the configuration is wrong.
    """
    from polyad.parallel import comm
    from polyad.parallel.probe import measure
    from polyad.train.config.run import load_config

    begun = time.monotonic()
    run = None if config is None else load_config(config, overrides)
    world = comm.initialize(timeout_minutes=2.0)
    facts = named_apart(comm.from_all(facts_of(run, world)))
    measured = measure(world, [each["host"] for each in facts])
    comm.shutdown()
    if not world.is_main:
        return None
    found = findings(facts, measured)
    return Found(
        processes=world.size,
        device=world.device.type,
        seconds=time.monotonic() - begun,
        ranks=facts,
        measured=measured,
        errors=[each.text for each in found if each.breaks],
        warnings=[each.text for each in found if not each.breaks],
    )


def findings(facts: Sequence[Facts], measured: Measured) -> list[Finding]:
    """Returns the problems, the worst first.

    Args:
        facts: facts of each rank.
        measured: measurements of all.
    """
    found = [
        *_differing(facts),
        *_devices(facts),
        *_data(facts),
        *_folder(facts),
        *_clocks(facts, measured),
        *_slow(facts, measured),
    ]
    return sorted(found, key=lambda each: not each.breaks)


def _hosts(ranks: Sequence[int], facts: Sequence[Facts]) -> str:
    """Names the distinct hosts of ranks, at most five."""
    names = list(dict.fromkeys(facts[rank]["host"] for rank in ranks))
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest


def _differing(facts: Sequence[Facts]) -> list[Finding]:
    # If data cannot be read, which is a separate finding, its contents are unknown.
    good: dict[str, str] = next((each["agreed"] for each in facts if not each["data_error"]), {})
    told = [
        (each["host"], {**(good if each["data_error"] else {}), **each["agreed"]}) for each in facts
    ]
    found = [Finding(True, line) for line in comparison(told)]
    kinds = [
        (each["host"], {"the kind of GPU": each["device"].get("gpu", "no GPU")}) for each in facts
    ]
    return [*found, *(Finding(False, line) for line in comparison(kinds))]


def _devices(facts: Sequence[Facts]) -> list[Finding]:
    found = []
    for each in facts:
        device, place = each["device"], f"{each['host']}, GPU {each['local_rank']}"
        first = each["local_rank"] == 0
        if first and 0 < device["gpus"] < each["local_processes"]:
            found.append(
                Finding(
                    True,
                    f"{each['host']} has {counted(device['gpus'], 'GPU')} for "
                    f"{each['local_processes']} processes",
                )
            )
        if first and not device["gpus"] and device["load"] > BUSY * device["cores"]:
            load = f"a load of {device['load']:.1f} on {device['cores']} cores"
            found.append(Finding(False, f"{each['host']} is busy: {load}"))
        if "gpu" not in device:
            continue
        total, free = device["gpu_memory_bytes"], device["gpu_memory_free_bytes"]
        if free < FREE_MEMORY * total:
            text = f"{place}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
            found.append(Finding(False, f"{text}; another program uses it"))
        if device.get("throttled"):
            text = f"{place}: clocks are throttled (reasons {device['throttled']:#x})"
            found.append(Finding(False, text))
        if device.get("ecc_errors"):
            text = f"{place}: {device['ecc_errors']} uncorrected memory errors"
            found.append(Finding(True, text))
        found += [Finding(False, f"{each['host']}: {line}") for line in device.get("xid", [])]
    return found


def _data(facts: Sequence[Facts]) -> list[Finding]:
    first = [each for each in facts if each["local_rank"] == 0 and each["data_error"]]
    return [Finding(True, f"{each['host']}: {each['data_error']}") for each in first]


def _folder(facts: Sequence[Facts]) -> list[Finding]:
    folders = [each["folder"] for each in facts if "folder" in each]

    def ranks(wrong: Callable[[SharedFolder], bool]) -> list[int]:
        return [rank for rank, each in enumerate(folders) if wrong(each)]

    if len(folders) < len(facts):  # no run was given
        return []
    if error := folders[0].get("error"):
        return [Finding(True, error)]
    found = []
    if blind := ranks(lambda seen: not seen["seen"]):
        found.append(
            Finding(
                True,
                f"run.folder: {_hosts(blind, facts)} cannot see what {facts[0]['host']} writes "
                f"next to it: all hosts need a shared file system",
            )
        )
    if late := ranks(lambda seen: seen["seen"] and not seen["renamed"]):
        text = f"run.folder: a renamed file is not visible on {_hosts(late, facts)}"
        found.append(Finding(True, text))
    if unlocked := ranks(lambda seen: seen.get("lock") == "taken")[1:]:
        text = (
            f"run.folder: a lock of {facts[0]['host']} has no effect on {_hosts(unlocked, facts)}: "
            f"two starts of a run at the same time go unnoticed (Lustre: mount it with flock)"
        )
        found.append(Finding(False, text))
    return found


def _clocks(facts: Sequence[Facts], measured: Measured) -> list[Finding]:
    apart = max(measured.clocks) - min(measured.clocks)
    if apart <= CLOCKS_APART:
        return []
    first, last = (measured.clocks.index(pick(measured.clocks)) for pick in (min, max))
    names = f"{facts[last]['host']} is {apart:.1f} s ahead of {facts[first]['host']}"
    return [Finding(False, f"clocks differ: {names}")]


def _slow(facts: Sequence[Facts], measured: Measured) -> list[Finding]:
    found = []
    usual = _upper_quartile(measured.flops)
    for rank, flops in enumerate(measured.flops):
        if flops < SLOW_DEVICE * usual:
            text = (
                f"{facts[rank]['host']}, process {facts[rank]['local_rank']} computes at "
                f"{flops / 1e12:.3g} TFLOP/s, others at {usual / 1e12:.3g}"
            )
            found.append(Finding(False, text))
    for links, between in ((measured.within, False), (measured.between, True)):
        found += _slow_links(facts, links, between)
    return found


def _slow_links(facts: Sequence[Facts], links: Sequence[Link], between: bool) -> list[Finding]:
    usual = _upper_quartile([link.bytes_per_second for link in links])
    slow = [link for link in links if link.bytes_per_second < SLOW_LINK * usual]
    # A host with a bad adapter gets one line, not one for each other host.
    culprits = [rank for rank in _ends(links) if 1 < _count(links, rank) == _count(slow, rank)]
    found = []
    for rank in culprits:
        own = [link.bytes_per_second for link in slow if rank in link[:2]]
        found.append(f"every link of {_place(facts, rank, between)} is slow: {_rate(max(own))}")
    for link in slow:
        if not set(link[:2]) & set(culprits):
            ends = " and ".join(_place(facts, rank, between) for rank in link[:2])
            found.append(f"the link between {ends} is slow: {_rate(link.bytes_per_second)}")
    return [Finding(False, f"{text}, others {_rate(usual)}") for text in found]


def _upper_quartile(values: Sequence[float]) -> float:
    """The usual speed, since one bad host of three makes two of three links slow."""
    return sorted(values)[round(0.75 * (len(values) - 1))] if values else 0.0


def _ends(links: Sequence[Link]) -> list[int]:
    return sorted({rank for link in links for rank in link[:2]})


def _count(links: Sequence[Link], rank: int) -> int:
    return sum(rank in link[:2] for link in links)


def _place(facts: Sequence[Facts], rank: int, between: bool) -> str:
    host = str(facts[rank]["host"])
    return host if between else f"process {facts[rank]['local_rank']} of {host}"


def _rate(bytes_per_second: float) -> str:
    return f"{in_bytes(bytes_per_second)}/s"


def table(result: Found) -> str:
    """Formats the result."""
    ranks, measured = result.ranks, result.measured
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
                f"{min(measured.flops[rank] for rank in members) / 1e12:.3g}",
                f"{measured.clocks[members[0]]:+.3f} s",
            )
        )
    lines = [*aligned(rows), *_links(measured)]
    lines += [f"error: {text}" for text in result.errors]
    lines += [f"warning: {text}" for text in result.warnings]
    if not result.errors:
        lines.append(f"no problems found ({result.seconds:.0f} s)")
    return "\n".join(lines)


def _links(measured: Measured) -> list[str]:
    rows: list[tuple[str, ...]] = [
        (name, f"{in_bytes(speed)}/s", "")
        for name, speed in (
            ("all-reduce", measured.all_reduce),
            ("all-to-all", measured.all_to_all),
        )
        if speed is not None
    ]
    pairs = (("pairs in a host", measured.within), ("pairs of hosts", measured.between))
    for what, links in pairs:
        speeds = [link.bytes_per_second for link in links]
        if speeds:
            least, most = (f"{in_bytes(speed)}/s" for speed in (min(speeds), max(speeds)))
            span = f"{least} to {most}" if len(speeds) > 1 else most
            rows.append((what, span, f"{len(speeds)} measured"))
    return aligned(rows) if rows else []


def check(result: Found) -> None:
    """Ends the command with status 1 if something would break a run.

    Raises:
        RunError: with the number of problems.
    """
    if result.errors:
        others = len(result.errors) - 1
        more = f", and {others} more" if others else ""
        raise RunError(f"a run would fail or be slow here: {result.errors[0]}{more}")
