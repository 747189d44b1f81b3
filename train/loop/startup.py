"""The time from the start of a process to the end of its first step, part by part."""

import os
import sys
import time
from pathlib import Path

PREFIX = "startup_"
"""How the keys begin that only the first record of a process has."""


class Startup:
    """Measures the time of each part of a start; the first part begins with the process."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic() - process_seconds()

    def lap(self, part: str) -> None:
        """Ends a part; the time that follows belongs to the next one.

        Args:
            part: its name; times of equal names are added up.
        """
        now = time.monotonic()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now

    def record(self, step_seconds: float) -> dict[str, float]:
        """The keys that the first record has for the start.

        Args:
            step_seconds: the time of the first step, which follows the last part.

        Returns:
            `startup_seconds`, from the start of the process to the end of that step, and the
            seconds of each part.
        """
        parts = self._seconds | {"first_step": step_seconds}
        named = {f"{PREFIX}{part}_seconds": seconds for part, seconds in parts.items()}
        return {f"{PREFIX}seconds": sum(parts.values())} | named


def startup_line(record: dict[str, float]) -> str:
    """The times of a start as a line for the console.

    Args:
        record: what `Startup.record` gave.
    """
    parts = [
        f"{key.removeprefix(PREFIX).removesuffix('_seconds').replace('_', ' ')} {seconds:.2f}"
        for key, seconds in record.items()
        if key != f"{PREFIX}seconds"
    ]
    total = record[f"{PREFIX}seconds"]
    return f"first step done {total:.2f} s after the start of the process: {', '.join(parts)}"


def process_seconds() -> float:
    """Seconds since this process was started."""
    if sys.platform == "linux":
        # Field 22 is the start in clock ticks after the boot. Fields are counted after the name in
        # parentheses, which may hold spaces. psutil is less exact: it adds the time of the boot,
        # which the kernel gives in whole seconds.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())
