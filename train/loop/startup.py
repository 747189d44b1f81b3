"""The time from the start of a process to the end of its first step, and what takes it."""

import os
import sys
import time
from pathlib import Path

PREFIX = "startup_"
"""Of the keys that the first record of a process has beside those of every step."""


class Startup:
    """Takes the time of each part of a start; the first part begins with the process itself."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic() - process_seconds()

    def lap(self, part: str) -> None:
        """Ends a part; what follows belongs to another.

        Args:
            part: its name; a part that comes again goes on.
        """
        now = time.monotonic()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now

    def record(self, step_seconds: float) -> dict[str, float]:
        """What the first record says of the start.

        Args:
            step_seconds: the time of the first step, which follows the last part.

        Returns:
            `startup_seconds`, from the start of the process to the end of that step, and what each
            part has of it.
        """
        parts = self._seconds | {"first_step": step_seconds}
        named = {f"{PREFIX}{part}_seconds": seconds for part, seconds in parts.items()}
        return {f"{PREFIX}seconds": sum(parts.values())} | named


def startup_line(record: dict[str, float]) -> str:
    """A start for a person.

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
        # The 22nd field, counted behind the name, which may hold anything: clock ticks after the
        # boot. psutil adds the time of the boot, which the kernel gives in whole seconds.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())
