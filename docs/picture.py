"""Draws a part of a report as one SVG file: the picture in the root README.

    python docs/picture.py RUN docs/report.svg --block 2 --experts 3,2 --tokens 60000

Charts, numbers and texts are those of the page. Styles are written out, so that the file looks
alike wherever it is shown as an image. The run of the picture in this folder:

    polyad prepare --source python-stdlib --tokenizer train:4096 --output runs/picture/data \
        --validation-fraction 0.02 --test-fraction 0.02
    polyad train configs/quickstart/gpt2-smoe.yaml run.folder=runs/picture/run \
        data.path=runs/picture/data model.hidden_size=128 \
        model.feed_forward.expert_hidden_size=256 parallel.expert_parallel_size=1 \
        train.steps=300 log.every=2 evaluation.every=25
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from polyad.parallel.checkpoint.finding import find_checkpoint
from polyad.train.page.charts import Chart, element, text
from polyad.train.page.html import Figure
from polyad.train.page.panels import in_light
from polyad.train.page.template import COLOURS, number, render, signs
from polyad.train.report.command import read_report
from polyad.train.report.content import Report
from polyad.train.report.page import facts, over_time_figures, shown_layers, training_figures
from polyad.train.report.top_text import Snippet
from polyad.train.report.top_tokens import ShownExpert

WIDTH, MARGIN, GAP = 1120, 30, 14
INNER = WIDTH - 2 * MARGIN
HALF = (INNER - GAP) // 2
CHARACTER, LINE = 6.6, 17
"""Width of a character and height of a line of the monospaced text, in pixels."""
LINES_SHOWN = 3
"""Lines of a token's context."""
MARK = f"rgb({COLOURS['mark'][0].replace(' ', ',')})"
SNIPPETS = 4
"""How many an expert shows."""
CSS = """
svg text { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
svg text.soft { fill: var(--soft); font-size: 12.5px; }
svg text.kicker { fill: var(--accent); font-weight: 600; letter-spacing: 1px; }
svg text.run { font-size: 25px; font-weight: 700; }
svg text.fact { font-size: 17px; font-weight: 600; }
svg text.heading { font-size: 14px; font-weight: 600; }
svg text.section { font-size: 18px; font-weight: 700; }
svg text.code { font: 11px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre; }
.card { fill: var(--card); stroke: var(--line); }
.frame { fill: none; stroke: var(--ink); stroke-width: 1.3; }
"""


def main() -> None:
    """Reads the command line, and writes the picture."""
    parser = argparse.ArgumentParser(description="Draws a part of a report as one SVG file.")
    parser.add_argument("run", type=Path, help="the folder of a run that has read text")
    parser.add_argument("picture", type=Path, help="the .svg file to write")
    parser.add_argument("--block", default="0", help="whose load and experts are shown")
    parser.add_argument("--experts", default="0", help="of that block, as 3,2")
    parser.add_argument("--tokens", type=int, help="about how many are read")
    given = parser.parse_args()
    report = read_report(
        given.run,
        find_checkpoint(given.run),
        layers=[given.block],
        experts=given.experts.split(","),
        top=SNIPPETS,
        tokens=given.tokens,
    )
    given.picture.write_text(picture(report))


def picture(report: Report) -> str:
    """The picture of a report: its charts, and the experts of the one layer that was read.

    Args:
        report: of a model that reads text.

    Returns:
        SVG.
    """
    parts = [*_header(report)]
    y = 190.0
    training, routing = training_figures(report), over_time_figures(report)
    for row in (
        [_named(training, "Loss")],
        [
            _named(routing, "Evenness of each token's mixture (1 = all experts alike)"),
            _named(routing, "Load of the busiest expert"),
        ],
    ):
        width = (INNER - GAP * (len(row) - 1)) // len(row)
        cards = [
            _card(figure, MARGIN + i * (width + GAP), y, width) for i, figure in enumerate(row)
        ]
        parts += [card for card, _ in cards]
        y += max(height for _, height in cards) + GAP
    assert report.read.text is not None
    ((name, experts),) = report.read.text.layers.items()
    (shown,) = (each for each in shown_layers(report) if each.layer.name == name)
    parts.append(text(MARGIN, y + 20, shown.layer.title.capitalize(), css="section"))
    parts.append(text(MARGIN + 80, y + 20, ", ".join(shown.facts), css="soft"))
    card, height = _card(shown.loads[0], MARGIN, y + 32, INNER)
    parts.append(card)
    y += 32 + height + GAP
    for expert in experts:
        parts += _expert(expert, y)
        y += 24 + -(-len(_words(expert)) // 2) * (LINES_SHOWN * LINE + 44) + GAP
    height = y + 6
    drawn = element(
        "svg",
        element("style", render("train/page/chart.css"), Markup(CSS)),
        element("rect", width=WIDTH, height=height, fill="var(--paper)"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height:g}",
        role="img",
        aria_label="A page of polyad report",
    )
    mixture = r"color-mix\(in oklab, (#\w+) (\d+)%, (#\w+)\)"
    return re.sub(mixture, _mixed, in_light(drawn)) + "\n"


def _mixed(mixture: re.Match[str]) -> str:
    """A mixture of two colours, taken in sRGB, near enough for a picture."""
    one, other = (bytes.fromhex(mixture[i][1:]) for i in (1, 3))
    share = int(mixture[2]) / 100
    pairs = zip(one, other, strict=True)
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def _header(report: Report) -> Iterator[Markup]:
    """Name, model and facts."""
    yield text(MARGIN, 38, "POLYAD REPORT", css="kicker")
    yield text(MARGIN, 68, report.run, css="run")
    yield text(MARGIN, 90, report.kind, css="soft")
    found = facts(report)
    width = (INNER - GAP * (len(found) - 1)) / len(found)
    for i, (name, value, small) in enumerate(found):
        x = MARGIN + i * (width + GAP)
        yield _box(x, 106, width, 70, rx=8)
        yield text(x + 12, 125, name, css="soft")
        yield text(x + 12, 147, value, css="fact")
        yield text(x + 12, 166, Markup(small).striptags())


def _box(x: float, y: float, width: float, height: float, rx: int) -> Markup:
    return element("rect", css="card", x=x, y=y, width=width, height=height, rx=rx)


def _named(figures: Sequence[Figure], heading: str) -> Figure:
    """The figure with this heading."""
    return next(figure for figure in figures if figure.heading == heading)


def _card(figure: Figure, x: float, y: float, width: float) -> tuple[Markup, float]:
    """A chart with its heading and legend on a card, and its height."""
    assert isinstance(figure.body, Chart)
    scale = (width - 24) / figure.body.width
    height = 42 + round(figure.body.height * scale)
    parts = [_box(x, y, width, height, rx=8), text(x + 14, y + 23, figure.heading, css="heading")]
    named, right = figure.legend, x + width - 14
    if sum(7 * len(each.label) + 34 for each in named) + 6 * len(figure.heading) > width - 28:
        named = ()  # no room beside the heading; the chart beside this one has the same colours
    for line in reversed(named):
        right -= 7 * len(line.label)
        parts.append(text(right, y + 23, line.label, css="soft"))
        parts.append(element("rect", x=right - 20, y=y + 17, width=14, height=3, fill=line.colour))
        right -= 34
    return element("g", *parts, figure.body.at(x + 12, y + 34, scale)), height


def _words(expert: ShownExpert[Snippet]) -> list[Snippet]:
    return [each for each in expert.top if each.top.among_words][:SNIPPETS]


def _expert(expert: ShownExpert[Snippet], y: float) -> Iterator[Markup]:
    """An expert's highest words in their context."""
    said = (
        f"load {number(expert.load, 3)} times the mean, in {100 * expert.active:.1f}% of the "
        f"tokens, at least 0.5 in {100 * expert.dominant:.2f}%"
    )
    yield text(MARGIN, y + 20, f"Expert {expert.name}", css="heading")
    yield text(MARGIN + 76, y + 20, said, css="soft")
    for i, snippet in enumerate(_words(expert)):
        top = y + 32 + i // 2 * (LINES_SHOWN * LINE + 44)
        yield from _snippet(snippet, MARGIN + i % 2 * (HALF + GAP), top)


class Character(NamedTuple):
    """What is shown of a token."""

    sign: str
    token: int
    """Its number."""
    weight: float
    """Its routing weight."""
    is_peak: bool
    """Whether it is the token that counts."""


def _snippet(snippet: Snippet, x: float, y: float) -> Iterator[Markup]:
    """A token in its context, the colour behind each token its routing weight."""
    place = f"document {snippet.place.document:,}, token {snippet.place.offset:,}"
    yield _box(x, y, HALF, LINES_SHOWN * LINE + 34, rx=6)
    yield text(x + 10, y + 19, f"{snippet.top.coefficient:.3f}", css="heading")
    yield text(x + HALF - 10, y + 19, place, "end", css="soft")
    characters = [
        Character(sign, token, min(1.0, max(piece.coefficients)), piece.is_peak)
        for token, piece in enumerate(snippet.shown())
        for sign in signs(piece.text)
    ]
    lines = _wrapped(characters, int((HALF - 24) / CHARACTER))
    peak = next(i for i, line in enumerate(lines) if any(c.is_peak for c in line))
    first = max(0, min(peak - 1, len(lines) - LINES_SHOWN))
    for row, line in enumerate(lines[first : first + LINES_SHOWN]):
        yield from _line(line, x + 12, y + 40 + row * LINE)


def _line(line: Sequence[Character], x: float, y: float) -> Iterator[Markup]:
    for token in sorted({c.token for c in line if c.weight > 0 or c.is_peak}):
        held = [i for i, c in enumerate(line) if c.token == token]
        place, width = x + held[0] * CHARACTER, len(held) * CHARACTER
        behind = line[held[0]]
        box = partial(element, "rect", x=place, y=y - 12, width=width, height=15)
        yield box(fill=MARK, fill_opacity=0.78 * behind.weight)
        if behind.is_peak:
            yield box(css="frame", rx=2)
    shown = "".join(c.sign for c in line)
    if shown.strip():
        # Positions are given for each character: no font decides where the colours are.
        at = " ".join(f"{x + i * CHARACTER:.1f}" for i in range(len(shown)))
        yield element("text", shown, css="code", x=at, y=y)


def _wrapped(characters: Sequence[Character], columns: int) -> list[list[Character]]:
    lines: list[list[Character]] = [[]]
    for character in characters:
        if character.sign == "\n" or len(lines[-1]) == columns:
            lines.append([])
        if character.sign != "\n":
            lines[-1].append(character)
    return lines


if __name__ == "__main__":
    main()
