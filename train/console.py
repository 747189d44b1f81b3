"""Console output of a command while it works."""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

USUAL_COLUMNS = 80
_shown = ContextVar("progress is shown", default=True)


@contextmanager
def progress(*, shown: bool) -> Iterator[None]:
    """A context in which `Progress` prints, or prints nothing."""
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)


class Console:
    """A line that is overwritten on a terminal; in a file, each text is a separate line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._shown = 0

    def show(self, line: str) -> None:
        """Prints a line, over the last one on a terminal."""
        if not self._live:
            print(line, file=self._stream, flush=True)
            return
        width = self._columns() - 1
        print(
            "\r" + line[:width].ljust(min(self._shown, width)),
            end="",
            file=self._stream,
            flush=True,
        )
        self._shown = len(line[:width])

    def _columns(self) -> int:
        """The width of the terminal; a default where it is unknown (some report 0)."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or USUAL_COLUMNS
        except (OSError, ValueError):  # closed
            return USUAL_COLUMNS

    def end(self) -> None:
        """Ends the line, so that later output does not overwrite it."""
        if self._live and self._shown:
            print(file=self._stream, flush=True)
        self._shown = 0


class Progress:
    """A console line with share, rate and time left, for the main process.

    Args:
        what: name of the work.
        amount: total amount.
        unit: unit of the amount.
    """

    def __init__(self, what: str, amount: float, unit: str = "tok") -> None:
        self._what, self._amount, self._unit = what, amount, unit
        self._start, self._last = time.monotonic(), 0.0
        self._console = Console(sys.stderr)

    def __call__(self, share: float) -> None:
        """Updates the line from time to time."""
        now = time.monotonic()
        if not _shown.get():
            return
        if share < 1 and now - self._last < (0.2 if sys.stderr.isatty() else 10):
            return
        self._last, seconds = now, max(now - self._start, 1e-9)
        left = seconds * (1 - share) / share if share else float("nan")
        self._console.show(
            f"{self._what} {bar(share)} {100 * share:3.0f}%  "
            f"{self._amount * share / seconds:,.0f} {self._unit}/s  {duration(left)} left"
        )
        if share >= 1:
            self._console.end()


def bar(share: float, width: int = 16) -> str:
    """A progress bar."""
    full = min(width, int(share * width))
    return "[" + "#" * full + "-" * (width - full) + "]"


def in_bytes(size: float) -> str:
    """Formats bytes in powers of 1,000, with three digits."""
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if float(number := f"{size:.3g}") < 1000:  # checked after rounding
            return f"{number} {unit}"
        size /= 1000
    return f"{size:,.0f} EB"


def counted(number: int, noun: str) -> str:
    """Formats a number with its noun, as in `1 process` and `2 processes`."""
    ending = "es" if noun.endswith(("s", "ch", "x")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def duration(seconds: float) -> str:
    """Formats seconds as h:mm:ss or m:ss."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
