"""What a command shows: results, as JSON values and as aligned lines, and a line while it works.

No other file aligns columns, or decides how NaN is written.
"""

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from html import escape
from typing import Any, TextIO

MOST_ROWS = 40
"""Maximum number of rows of a table in a text; JSON has all."""
USUAL_COLUMNS = 80
_shown = ContextVar("progress is shown", default=True)


def json_value(value: Any) -> Any:
    """Converts a value to one that JSON can represent, recursively.

    Numbers that JSON cannot represent become null. Dataclasses and named tuples become objects with
    a key per field, unless they have a `to_json`; arrays and tensors become lists.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "to_json"):
        return json_value(value.to_json())
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return json_value(value._asdict())
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    if isinstance(value, dict):
        return {name: json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    return value


def aligned(rows: Iterable[Sequence[str]], sides: str = "<>") -> list[str]:
    """Formats rows as lines with aligned columns.

    Args:
        rows: rows of equally many cells.
        sides: alignment of each column, `<` or `>`; the last one applies to all further columns. By
            default a name on the left, and numbers on the right.
    """
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width, side = max(map(len, cells)), sides[min(number, len(sides) - 1)]
        columns.append([cell.ljust(width) if side == "<" else cell.rjust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The result of an analysis; its text, its JSON and a page are made of it.

    Columns `x_low` and `x_high` of a table are the 95% interval of its column `x`. An expert is
    named by `module` and `expert`, and by `level` in a hierarchy, as in a trace.
    """

    facts: Mapping[str, Any]
    """Values by name, in the order of display."""
    frames: Mapping[str, Any] = field(default_factory=dict)
    """Tables, `pandas.DataFrame` by name."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """The line above a table in the text, by its name, in the order of display; a table without one
    is in JSON alone."""

    def with_facts(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> "Tables":
        """Returns the same with further facts around its own."""
        return replace(self, facts={**before, **self.facts, **after})

    def __getitem__(self, name: str) -> Any:
        """Returns a table (`pandas.DataFrame`) or a fact by its name."""
        both = {**self.facts, **self.frames}
        if name not in both:
            raise KeyError(f"{name}: there are {', '.join(both)}")
        return both[name]

    def __str__(self) -> str:
        """Formats the same as `text`."""
        return self.text()

    def _repr_html_(self) -> str:
        """Formats the facts and the tables with a title for a notebook."""
        import pandas as pd

        facts = pd.Series({_heading(k): in_words(v) for k, v in self.facts.items()}, dtype=object)
        parts = [facts.to_frame("").to_html(header=False)]
        for name, title in self.titles.items():
            table = self.frames.get(name, ())
            if len(table):
                parts += [f"<p>{escape(_heading(name))}: {escape(title)}</p>"]
                parts += [table.to_html(index=False, max_rows=MOST_ROWS)]
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The facts, and each table as a list of its rows."""
        rows = {name: frame.to_dict("records") for name, frame in self.frames.items()}
        return {**self.facts, **rows}

    def text(self) -> str:
        """Names and values, then the tables that have a title."""
        facts = [(_heading(name), in_words(value)) for name, value in self.facts.items()]
        lines = aligned(facts, "<")
        for name, title in self.titles.items():
            if len(self.frames.get(name, ())):
                lines += ["", f"{_heading(name)}: {title}", *_table(self.frames[name])]
        return "\n".join(lines)


def in_words(value: Any) -> str:
    """Formats a value of a result for display; `-` for one that is unknown."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _decimals(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(in_words, value)) or "none"
    return str(value)


def _table(frame: Any) -> Iterator[str]:
    """Formats a table: intervals in brackets, with * beside a change if it excludes 0."""
    names = [name for name in frame.columns if not name.endswith(("_low", "_high"))]
    if "level" in names and not frame["level"].any():
        names.remove("level")
    rows: list[list[str]] = [["" if name == "module" else _heading(name) for name in names]]
    above = ""
    for row in frame.head(MOST_ROWS).to_dict("records"):
        cells = [_cell(row, name) for name in names]
        if names[0] == "module":
            above, cells[0] = cells[0], "" if cells[0] == above else cells[0]
        rows.append(cells)
    numbers = [frame[name].dtype.kind in "if" for name in names]
    yield from aligned(rows, "".join("<>"[is_number] for is_number in numbers))
    if len(frame) > MOST_ROWS:
        yield f"{MOST_ROWS} of {len(frame):,} rows; --json FILE has all, in Python the table"


def _cell(row: Mapping[str, Any], name: str) -> str:
    value, low, high = (row.get(f"{name}{end}") for end in ("", "_low", "_high"))
    if not isinstance(value, float) or math.isnan(value):
        return in_words(value)
    sign = "+" if name.endswith("change") else ""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return _decimals(value, sign)
    star = " *" if sign and (low > 0 or high < 0) else ""
    bounds = f"[{_decimals(low, sign)}, {_decimals(high, sign)}]"
    return f"{_decimals(value, sign)} {bounds}{star}"


def _decimals(value: float, sign: str = "") -> str:
    """Formats a number with four decimals, and never as -0."""
    return f"{round(value, 4) + 0.0:{sign}.4f}"


def _heading(name: str) -> str:
    return name.replace("_", " ")


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
