"""Progress of a pass over data: a bar on a terminal, and a line at its end."""

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

Report = Callable[[str], None]


class Progress:
    """Prints the progress of passes over data.

    Args:
        report: Receives each line; None writes to standard error, with a bar on a terminal.
    """

    def __init__(self, report: Report | None = None) -> None:
        self._report = report
        self._bar: Any = None
        self._what, self._begun = "", 0.0

    def say(self, line: str) -> None:
        """Writes a line of its own.

        Args:
            line: The line.
        """
        if self._report is not None:
            self._report(line)
        else:
            tqdm.write(line, file=sys.stderr)

    def start(self, what: str, total_bytes: int) -> None:
        """Begins a pass.

        Args:
            what: What is being done.
            total_bytes: How much there is to do; 0 if that is not known.
        """
        self.close()
        self._what, self._begun = what, time.monotonic()
        disable = None if self._report is None else True  # None: where there is no terminal
        self._bar = tqdm(
            total=total_bytes or None, desc=what, unit="B", unit_scale=True, leave=False,
            disable=disable,
        )  # fmt: skip

    def update(self, done_bytes: int) -> None:
        """Shows the state of the pass.

        Args:
            done_bytes: Bytes read so far.
        """
        self._bar.update(done_bytes - self._bar.n)

    def finish(self, done_bytes: int, tokens: int = 0) -> None:
        """Says what the pass did and how fast.

        Args:
            done_bytes: Bytes of the sources read.
            tokens: Tokens written, where the pass makes any.
        """
        self.close()
        seconds = max(time.monotonic() - self._begun, 1e-9)
        made = f", {tokens:,} tokens ({tokens / seconds:,.0f} a second)" if tokens else ""
        megabytes = done_bytes / 1e6
        self.say(
            f"{self._what}: {megabytes:,.1f} MB in {tqdm.format_interval(seconds)} "
            f"({megabytes / seconds:,.1f} MB/s){made}"
        )

    def close(self) -> None:
        """Ends the bar, also after an error."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
