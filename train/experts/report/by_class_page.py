"""The part of a page about experts and classes: what each expert gets of every class."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from polyad.train.experts.information import Matrix
from polyad.train.experts.report.by_class import (
    LEAST_EXPECTED,
    MOST_LEANING,
    SHUFFLES,
    Lean,
    LevelByClass,
)
from polyad.train.experts.report.charts import number
from polyad.train.experts.report.class_page import figure_of_table, long_table, table
from polyad.train.experts.report.class_pass import FEW_CLASSES
from polyad.train.experts.report.content import Report
from polyad.train.experts.report.layers import figure
from polyad.train.experts.report.matrix_chart import NARROW_COLUMNS, Cell, matrix_chart

MOST_EXPERTS = 64
"""Up to so many experts of a level are drawn as a matrix."""
HEADING = "Share of each expert"
STRONGEST_LIFT = 4.0
"""A lift that has the full colour, as has its inverse."""


def by_class_section(report: Report) -> str:
    """Experts by class; nothing where none were counted.

    Args:
        report: what the page says.

    Returns:
        HTML.
    """
    read = report.classes
    if read is None or not read.layers:
        return ""
    word = "assignments" if report.is_sparse else "coefficients"
    titles = {layer.name: layer.title for layer in report.routed}
    rows, parts = [], []
    for place, (name, levels) in enumerate(read.layers.items()):
        for depth, level in enumerate(levels):
            title = titles[name] + (f", level {depth}" if len(levels) > 1 else "")
            rows.append(_row(title, level))
            is_open = place == 0 or len(read.layers) <= 4
            parts.append(_level(title, level, is_open=is_open))
    heads = ("layer", "I(E; Y), bits", "by chance", "leans most", "lift")
    summary = figure_of_table(
        "How much an expert reveals about the class",
        table(heads, rows),
        f"Mutual information of a token's expert and its class. By chance: the mean after "
        f"{SHUFFLES} shuffles of the labels among the {read.unit}s; values at or below "
        f"chance are meaningless.",
        wide=True,
    )
    return (
        f'<section id="by-class"><h2>Experts by class</h2><p class="note">Of the {word} of every '
        f"class the share of each expert, beside its share of all. Lift is the first over the "
        f"second. The tokens of a {read.unit} have its true class; padding is not counted"
        f"{'; assignments that a capacity drops are' if report.is_sparse else ''}.</p>"
        f'<div class="grid">{summary}</div>{"".join(parts)}</section>'
    )


def _row(title: str, level: LevelByClass) -> list[str]:
    leaning = level.leaning(1)
    said = [escape(title.capitalize()), f"{level.information:.4f}", f"{level.by_chance:.4f}"]
    if not leaning:
        return [*said, "–", "–"]
    (most,) = leaning
    return [*said, f"expert {most.expert} to {escape(most.group)}", f"{most.lift:.2f}"]


def _level(title: str, level: LevelByClass, *, is_open: bool) -> str:
    facts = f"<span>{level.information:.4f} bits</span><span>{level.by_chance:.4f} by chance</span>"
    many = len(level.groups) > FEW_CLASSES
    leaning = level.of_each_group() if many else level.leaning(MOST_LEANING)
    heading = (
        "The expert that leans most to each class" if many else "Experts that lean most to a class"
    )
    body = level_matrix(level, by_expert=True) + _leaning(leaning, heading)
    return (
        f'<details class="layer"{" open" if is_open else ""}><summary><b>'
        f'{escape(title.capitalize())}</b>{facts}</summary><div class="inside">{body}</div>'
        f"</details>"
    )


def level_matrix(level: LevelByClass, heading: str = HEADING, *, by_expert: bool) -> str:
    """The table of experts and classes as a picture; nothing where it would be too large.

    Args:
        level: of a layer.
        heading: of the picture.
        by_expert: whether classes of which the same expert gets most stand together; else they
            keep their order.

    Returns:
        HTML.
    """
    if len(level.groups) > FEW_CLASSES or len(level.experts) > MOST_EXPERTS:
        return ""
    share_S, share_SY = level.share_S, level.share_SY
    order = _sorted_by_expert(share_SY) if by_expert else range(len(level.groups))
    cells = [
        [
            Cell(f"{100 * share_S[s]:.1f}%", f"expert {expert}: of all {100 * share_S[s]:.2f}%"),
            *(
                _cell(
                    *(expert, level.groups[y]),
                    *(float(share_SY[s, y]), float(share_S[s]), float(level.counts_SY[s, y])),
                )
                for y in order
            ),
        ]
        for s, expert in enumerate(level.experts)
    ]
    rows = [f"expert {expert}" for expert in level.experts]
    return figure(
        heading,
        matrix_chart(
            rows, ["all", *(level.groups[y] for y in order)], cells, title="Experts and classes"
        ),
        f"A column adds up to 100%. Blue: more than the expert's share of all, orange: less; the "
        f"full colour is {STRONGEST_LIFT:g} times as much, or as little.",
        wide=len(level.groups) >= NARROW_COLUMNS,
    )


def _sorted_by_expert(share_SY: Matrix) -> list[int]:
    """Classes in the order of the expert that gets most of each, and then of how much it gets."""
    known_SY = np.nan_to_num(share_SY)
    return [int(y) for y in np.lexsort((-known_SY.max(0), known_SY.argmax(0)))]


def _cell(expert: str, group: str, share: float, share_of_all: float, count: float) -> Cell:
    if math.isnan(share) or share_of_all == 0:
        return Cell("–", f"expert {expert}, {group}: no token")
    lift = share / share_of_all
    octaves = math.log2(lift) if lift > 0 else -math.inf
    return Cell(
        f"{100 * share:.1f}%",
        f"expert {expert}, {group}: {number(count)} tokens, {100 * share:.2f}%, lift {lift:.2f}",
        min(1.0, abs(octaves) / math.log2(STRONGEST_LIFT)),
        "var(--accent)" if octaves >= 0 else "var(--second)",
    )


def _leaning(leaning: Sequence[Lean], heading: str) -> str:
    if not leaning:
        return '<p class="note">Too few tokens to say to which class an expert leans.</p>'
    rows = [
        [
            *(escape(each.expert), escape(each.group), number(each.tokens)),
            *(f"{100 * share:.1f}%" for share in (each.share, each.share_of_all)),
            f"{each.lift:.2f}",
        ]
        for each in leaning
    ]
    heads = ("expert", "class", "tokens", "share of the class", "share of all", "lift")
    return figure_of_table(
        heading,
        long_table(heads, rows, names=2),
        f"The highest lift first, where at least {LEAST_EXPECTED:g} tokens are to be expected.",
        wide=True,
    )
