"""The part of a page about experts and classes: what each expert gets of every class."""

from collections.abc import Sequence
from html import escape

from polyad.train.experts.by_class import (
    FEW_CLASSES,
    LEAST_EXPECTED,
    MOST_LEANING,
    SHUFFLES,
    Lean,
    LevelByClass,
)
from polyad.train.experts.class_matrix import level_matrix
from polyad.train.page.charts import number
from polyad.train.page.html import figure_of_table, long_table, table
from polyad.train.report.content import Report


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
