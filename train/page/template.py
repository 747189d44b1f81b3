"""Pages from templates: self-contained HTML in which all text is escaped.

A template is beside the code that fills it, and is named by its path in the package.
"""

import functools
import math
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the package."""
COLOURS = {
    "paper": ("#f7f7f5", "#14171a"), "card": ("#ffffff", "#1c2024"),
    "ink": ("#1f2328", "#e3e6e8"), "soft": ("#57606a", "#a2abb4"),
    "line": ("#dcdfe3", "#343a41"), "unused": ("#f3e2c9", "#453324"),
    "accent": ("#1f5f8b", "#6db3de"), "second": ("#b4541a", "#e39a63"),
    "shallow": ("#8fb8cf", "#35617d"), "deep": ("#173f5f", "#b5dcf2"),
    "mark": ("226 152 24", "196 118 20"),
    "series-0": ("#4477aa", "#6f9fd0"), "series-1": ("#228833", "#54b565"),
    "series-2": ("#aa3377", "#e07fbb"), "series-3": ("#dd6611", "#e5803a"),
    "series-4": ("#0099bb", "#35b3d0"), "series-5": ("#997700", "#b89a35"),
    "series-6": ("#555555", "#a2a2a2"), "series-7": ("#cc3311", "#ff8c71"),
    "series-8": ("#77aa22", "#9ccc50"), "series-9": ("#332288", "#b8a8ff"),
}  # fmt: skip
"""The colors of the light and the dark scheme, by CSS variable. Those of `SERIES` are
distinguishable with most kinds of color blindness."""
SERIES = tuple(f"var(--{name})" for name in COLOURS if name.startswith("series-"))
"""The colors of variants, in order."""

END = "⏎"
"""Symbol for the end of a line."""
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_PICTURES |= dict.fromkeys(range(127, 160), 0x2421)


def page(template: str, **values: object) -> str:
    """Fills the template of a whole page; like `render` for a part."""
    return _environment().get_template(template).render(values)


def render(template: str, **values: object) -> Markup:
    """Fills the template of a part of a page.

    Args:
        template: its path in the package, such as `train/page/table.html`.
        values: its variables; escaped unless they are `Markup` or have an `__html__`, as charts and
            tables do.
    """
    return Markup(page(template, **values))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(ROOT),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "thousands": "{:,}".format, "visible": visible}
    environment.globals["colours"] = COLOURS
    return environment


def number(value: float, digits: int = 4) -> str:
    """Formats a number with few digits and thousands separators.

    Args:
        value: any number.
        digits: significant digits of numbers below 1,000.
    """
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e15):
        return f"{value:.2e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def signs(text: str) -> str:
    """Makes line ends and control characters of a text visible.

    Args:
        text: text of a token, a sample or a class.
    """
    return text.replace("\r\n", "\n").translate(_PICTURES).replace("\n", f"{END}\n")


def visible(text: str) -> Markup:
    """The same for HTML, where the symbol for a line end has its own color."""
    return escape(signs(text)).replace(
        f"{END}\n", Markup('<span class="sign">{}</span>\n').format(END)
    )
