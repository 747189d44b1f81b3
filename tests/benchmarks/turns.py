"""Times several variants in turn, and compares their times by ratios; the device they run on.

A machine is faster in one minute than in the next. So a run is compared with the base's of its own
turn, and the median of these ratios is what counts; how sure it is stands beside it. The order of
the variants changes from turn to turn, so that what a run leaves in caches is not always found by
the same variant.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from polyad.parallel.host_memory import keep_freed_memory
from polyad.train.bench import interval
from polyad.train.errors import ConfigError

Run = Callable[[], tuple[float, ...]]
"""Does the work once; returns the seconds of its parts."""
Times = dict[str, list[tuple[float, ...]]]
"""By variant, the parts of each turn, in seconds."""
SLOW = 10
"""Variants that take longer than this multiple of the base are timed once: their ratio needs no
third digit."""


def take_turns(
    runs: Mapping[str, Run], repeats: int, *, before: int = 1, base: str | None = None
) -> Times:
    """Runs every variant once per turn, and reports progress.

    Args:
        runs: The variants by name.
        repeats: Turns that count.
        before: Turns before them.
        base: A variant; others that take `SLOW` times as long run in one turn that counts, not in
            all. None: all run in all.

    Returns:
        The seconds of the turns that count.
    """
    times: Times = {name: [] for name in runs}
    slow: set[str] = set()
    began = 0.0
    for turn in range(before + repeats):
        if turn == before:
            began = time.perf_counter()
        for name in _order(list(runs), turn):
            if name not in slow:
                taken = runs[name]()
                if turn >= before:
                    times[name].append(taken)
        if turn == before and base:
            slow = {name for name in runs if sum(times[name][0]) > SLOW * sum(times[base][0])}
        say(_progress(turn, before, repeats, began))
    return times


def clocked(work: Callable[[], object], device: str = "cpu") -> Run:
    """A run that has one part.

    Args:
        work: The work to time.
        device: Where it runs.
    """

    def run() -> tuple[float, ...]:
        started = now(device)
        work()
        return (now(device) - started,)

    return run


def _order(names: list[str], turn: int) -> list[str]:
    """Every variant comes first, and every second turn goes the other way."""
    first = turn // 2 % len(names)
    names = names[first:] + names[:first]
    return names[::-1] if turn % 2 else names


def _progress(turn: int, before: int, repeats: int, began: float) -> str:
    done = turn + 1 - before
    if done <= 0:
        return f"  {turn + 1} of {before} before the clock counts"
    each = (time.perf_counter() - began) / done
    return f"  {done} of {repeats}, {each:.2g} s a turn, {each * (repeats - done):.0f} s left"


def summary(times: Times, base: str) -> dict[str, dict[str, Any]]:
    """The results of every variant.

    Args:
        times: Of `take_turns`.
        base: The variant that the others are compared with.

    Returns:
        JSON values: `seconds`, the median of whole runs; `seconds_ratio`, the median of the turns'
        ratios to the base; `seconds_ratio_interval`, where that median lies with a probability of
        90%, or null where there are too few turns; `timed`, turns.
    """
    whole = {name: [sum(parts) for parts in taken] for name, taken in times.items()}
    rows = {}
    for name, taken in whole.items():
        # What was timed once has the first turn.
        ratios = [one / other for one, other in zip(taken, whole[base], strict=False)]
        rows[name] = {
            "seconds": statistics.median(taken),
            "seconds_ratio": statistics.median(ratios),
            "seconds_ratio_interval": interval(ratios),
            "timed": len(taken),
        }
    return rows


def part_medians(times: Times, part: int) -> dict[str, float]:
    """Median seconds of one part of the runs.

    Args:
        times: Of `take_turns`.
        part: Which, from 0.
    """
    return {name: statistics.median(one[part] for one in taken) for name, taken in times.items()}


def span(found: tuple[float, float] | None, digits: int = 2) -> str:
    """An interval for a table.

    Args:
        found: By `interval`.
        digits: After the point.
    """
    return "-" if found is None else f"{found[0]:.{digits}f}-{found[1]:.{digits}f}"


def say(line: str) -> None:
    """Prints a line of progress."""
    print(line, file=sys.stderr, flush=True)


def prepare_device(device: str) -> None:
    """Checks that the device exists, and sets up the CPU's memory as a run does.

    Args:
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: It is not.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: cuda: there is no CUDA device here; cpu is allowed")
    if device == "cpu":
        keep_freed_memory()


def synchronize(device: str | torch.device) -> None:
    """Waits until the device has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def now(device: str | torch.device) -> float:
    """The time in seconds, once the device has finished its work."""
    synchronize(device)
    return time.perf_counter()


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
