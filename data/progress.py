"""Progress of `polyad prepare`: a line that is overwritten, or a new line every 10 s."""

import sys
import time
from collections.abc import Callable

Report = Callable[[str], None]

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 10.0


class Progress:
    """Prints the progress of a pass over the text, its rate, and the time left.

    Args:
        report: Receives each line; None writes to standard error, in place on a terminal.
    """

    def __init__(self, report: Report | None = None) -> None:
        self._report = report
        self._in_place = report is None and sys.stderr.isatty()
        self._line_open = False
        self.start("", 0)

    def say(self, line: str) -> None:
        """Writes a line of its own.

        Args:
            line: The line.
        """
        self._end_line()
        if self._report is not None:
            self._report(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def start(self, what: str, total_bytes: int) -> None:
        """Begins a pass.

        Args:
            what: What is being done.
            total_bytes: How much there is to do; 0 if that is not known.
        """
        self._end_line()
        self._what, self._total_bytes = what, total_bytes
        self._begun = self._written = time.monotonic()

    def update(self, done_bytes: int, tokens: int = 0) -> None:
        """Writes the state of the pass if the last time is long enough ago.

        Args:
            done_bytes: Bytes of the sources read so far.
            tokens: Tokens written, where the pass makes any.
        """
        now = time.monotonic()
        if now - self._written < (TERMINAL_SECONDS if self._in_place else LOG_SECONDS):
            return
        self._written = now
        line = self._state(done_bytes, tokens, now - self._begun)
        if not self._in_place:
            self.say(line)
            return
        sys.stderr.write(f"\r{line}\x1b[K")  # clears the rest of a longer line before
        sys.stderr.flush()
        self._line_open = True

    def finish(self, done_bytes: int, tokens: int = 0) -> None:
        """Says what the pass did and how fast.

        Args:
            done_bytes: Bytes of the sources read.
            tokens: Tokens written, where the pass makes any.
        """
        seconds = max(time.monotonic() - self._begun, 1e-9)
        made = f", {tokens:,} tokens ({tokens / seconds:,.0f} a second)" if tokens else ""
        megabytes = done_bytes / 1e6
        self.say(
            f"{self._what}: {megabytes:,.1f} MB in {_duration(seconds)} "
            f"({megabytes / seconds:,.1f} MB/s){made}"
        )

    def close(self) -> None:
        """Moves the cursor to a new line, also after an error."""
        self._end_line()

    def _state(self, done_bytes: int, tokens: int, seconds: float) -> str:
        total, rate = self._total_bytes, done_bytes / seconds
        share = f"{min(done_bytes / total, 1.0):4.0%}" if total else f"{done_bytes / 1e6:,.1f} MB"
        parts = [f"{self._what}: {share}", f"{rate / 1e6:,.1f} MB/s"]
        if tokens:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        if rate > 0 and total:
            parts.append(f"{_duration(max(total - done_bytes, 0) / rate)} left")
        return ", ".join(parts)

    def _end_line(self) -> None:
        if self._line_open:
            sys.stderr.write("\n")
            self._line_open = False


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
