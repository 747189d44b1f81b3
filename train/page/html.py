"""Frames, tables and text in HTML."""

from collections.abc import Sequence
from html import escape

FEW_ROWS = 20
"""Rows of a long table that are shown at once."""
TABLE_CSS = """
svg text.cell { fill: var(--ink); font-size: 11px; font-variant-numeric: tabular-nums; }
svg text.cell.on { fill: var(--paper); }
table.numbers { border-collapse: collapse; width: 100%; font-size: .86rem;
  font-variant-numeric: tabular-nums; }
table.numbers th { color: var(--soft); font-weight: 400; text-align: right; vertical-align: bottom;
  padding: .15rem .5rem; }
table.numbers td { text-align: right; border-top: 1px solid var(--line); padding: .2rem .5rem;
  vertical-align: top; }
table.numbers .name { text-align: left; overflow-wrap: anywhere; }
table.numbers pre { margin: 0; min-width: 14rem; }
table.numbers .picture { width: 104px; }
details.more > summary { cursor: pointer; color: var(--accent); font-size: .86rem;
  padding: .35rem .5rem; }
figure.table { overflow-x: auto; }
"""


def figure(heading: str, body: str, caption: str = "", *, wide: bool = False) -> str:
    """A chart with its heading and a caption below."""
    css = ' class="wide"' if wide else ""
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure{css}><h3>{escape(heading)}</h3>{body}{below}</figure>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A table of numbers.

    Args:
        heads: of the columns.
        rows: HTML of each cell.
        names: how many of the first columns are words.

    Returns:
        HTML.
    """
    css = [' class="name"' if n < names else "" for n in range(len(heads))]

    def row(tag: str, cells: Sequence[str]) -> str:
        filled = zip(css, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{c}>{each}</{tag}>' for c, each in filled)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f'<table class="numbers"><thead>{row("th", heads)}</thead><tbody>{body}</tbody></table>'


def long_table(heads: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A table with a row a class, of which the first ones are shown, and others on demand.

    Args:
        heads: of the columns.
        rows: HTML of each cell.
        names: how many of the first columns are words.

    Returns:
        HTML.
    """
    shown, others = rows[:FEW_ROWS], rows[FEW_ROWS:]
    if not others:
        return table(heads, shown, names)
    return (
        f'{table(heads, shown, names)}<details class="more"><summary>the other {len(others):,} '
        f"classes</summary>{table(heads, others, names)}</details>"
    )


def figure_of_table(heading: str, body: str, caption: str = "", *, wide: bool) -> str:
    """A table in a frame as charts have it; it scrolls where it is too wide."""
    css = "wide table" if wide else "table"
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure class="{css}"><h3>{escape(heading)}</h3>{body}{below}</figure>'


def visible(text: str) -> str:
    """Text for HTML: line ends are marked, and control characters have pictures."""
    parts = []
    for character in text.replace("\r\n", "\n"):
        if character == "\n":
            parts.append('<span class="sign">⏎</span>\n')
        elif character == "\t":
            parts.append("\t")
        elif ord(character) < 32:
            parts.append(chr(0x2400 + ord(character)))
        elif 127 <= ord(character) < 160:
            parts.append("\u2421")
        else:
            parts.append(escape(character))
    return "".join(parts)
