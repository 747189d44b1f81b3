"""What the panels of a study's picture share: sizes, colours, axes."""

from collections.abc import Callable, Sequence
from html import escape

WIDTH, MARGIN, GAP = 520, 16, 28
"""The width of a panel; the margin around all panels; the gap between two."""
ROW, HEAD, FOOT = 26, 44, 34
"""Heights of a variant's row, of a panel's title and of its axis."""
Scale = Callable[[float], float]
COLOURS = (
    *("#4477aa", "#228833", "#aa3377", "#dd6611", "#0099bb", "#997700"),
    *("#555555", "#cc3311", "#77aa22", "#332288"),
)
"""Colours of variants, in their order: most who do not see all colours tell them apart."""
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:14px}"
    ".note{fill:#666;font-size:11px}.grid{stroke:#e3e3e3}.zero{stroke:#888}"
)


def heading(title: str, note: str, x: float, y: float) -> list[str]:
    """A panel's title, and what its marks mean."""
    return [
        f'<text class="title" x="{x:g}" y="{y + 14:g}">{escape(title)}</text>',
        f'<text class="note" x="{x:g}" y="{y + 30:g}">{escape(note)}</text>',
    ]


def span(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis: the least and the most value, with room beside both."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.5
    return low - room, high + room


def scale(low: float, high: float, first: float, last: float) -> Scale:
    """From values to places."""
    return lambda value: round(first + (value - low) / (high - low) * (last - first), 1)
