"""Pages from templates: self-contained HTML in which all text is escaped.

A template is beside the code that fills it, and is named by its path in the package.
"""

import functools
import math
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the package."""
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
        template: its path in the package, such as `train/experts/view.html`.
        values: its variables; escaped unless they are `Markup`, as charts are.
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
    environment.filters |= {"thousands": "{:,}".format, "signs": signs}
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
        text: text of a token or a class.
    """
    return text.replace("\r\n", "\n").translate(_PICTURES).replace("\n", f"{END}\n")
