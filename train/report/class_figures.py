"""The parts of a page about classes: scores, confusions, examples, and each expert's share of every
class."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from polyad.train.experts.by_class import (
    FEW_CLASSES,
    LEAST_EXPECTED,
    MOST_LEANING,
    SHUFFLES,
    Lean,
    LevelByClass,
)
from polyad.train.experts.class_matrix import level_matrix
from polyad.train.page.charts import Line
from polyad.train.page.html import Figure, Table
from polyad.train.page.matrices import NARROW_COLUMNS, Cell, matrix_chart
from polyad.train.page.template import number, render, visible
from polyad.train.report.classes import ClassPass
from polyad.train.report.content import Report
from polyad.train.report.layers import FEW_LAYERS, Pictures
from polyad.train.report.top_images import ImagePass
from polyad.train.tasks.scores import TITLES


def class_note(read: ClassPass) -> str:
    """The metrics in words."""
    titles, names = dict(TITLES), list(read.held)
    if len(names) > 1:
        titles["f1"] = f"F1 of {names[1]}"
    metrics = ", ".join(f"{titles[name]} {value:.4f}" for name, value in read.metrics.items())
    loss = "squared error" if read.task == "regression" else "loss"
    return f"{metrics}, {loss} {read.loss:.4f}"


def class_figures(read: ClassPass, images: ImagePass | None) -> list[Figure]:
    """Figures of scores per class, confusions and the samples with the largest loss."""
    figures = [_scores(read)] if read.scores else []
    if read.matrix_KK is not None:
        figures.append(_matrix(read, read.matrix_KK.tolist()))
    elif read.confusions:
        figures.append(_confusions(read))
    return figures + ([_examples(read, images)] if read.examples else [])


def _scores(read: ClassPass) -> Figure:
    many = len(read.scores) > FEW_CLASSES
    order = list(read.scores)
    if many:  # classes without samples and predictions come last
        order.sort(
            key=lambda name: (
                read.scores[name].f1 is None,
                read.scores[name].f1 or 0.0,
                -read.held[name],
            )
        )
    rows = []
    for name in order:
        score = read.scores[name]
        shares = [
            "–" if value is None else f"{value:.3f}"
            for value in (score.precision, score.recall, score.f1)
        ]
        counts = [f"{value:,}" for value in (read.held[name], score.predicted, score.right)]
        rows.append([name, *counts, *shares])
    heads = ("class", f"{read.unit}s", "predicted", "right", "precision", "recall", "F1")
    caption = "Sorted by class number."
    if many:
        caption = "Sorted by F1, lowest first; for equal F1, the class with most samples first."
    return Figure(
        heading="Scores of each class",
        body=Table(heads=heads, rows=rows, by_class=True),
        caption=caption,
        wide=len(rows) > NARROW_COLUMNS,
    )


def _confusions(read: ClassPass) -> Figure:
    rows = []
    for each in read.confusions:
        share = f"{100 * each.samples / read.held[each.true]:.0f}%"
        rows.append((each.true, each.predicted, f"{each.samples:,}", share))
    heads = ("true", "predicted", f"{read.unit}s", "share of the true class")
    body = Table(heads=heads, rows=rows, names=2)
    return Figure(heading="Most frequent confusions", body=body, wide=True)


def _matrix(read: ClassPass, counts: Sequence[Sequence[int]]) -> Figure:
    names, cells = list(read.scores), []
    for true, row in zip(names, counts, strict=True):
        held = max(1, read.held[true])
        cells.append(
            [
                Cell(
                    f"{count:,}",
                    f"true {true}, predicted {found}: {count:,} of {read.held[true]:,} "
                    f"({100 * count / held:.0f}%)",
                    count / held,
                    "var(--accent)" if found == true else "var(--second)",
                )
                for found, count in zip(names, row, strict=True)
            ]
        )
    return Figure(
        heading="Confusion",
        body=matrix_chart(names, names, cells, title="Confusion matrix"),
        caption="Rows are true classes, columns predicted ones; the colour shows the share within "
        "the "
        "row.",
        legend=[
            Line(label="right", values=(), colour="var(--accent)"),
            Line(label="wrong", values=(), colour="var(--second)"),
        ],
        wide=len(names) > NARROW_COLUMNS,
    )


def _examples(read: ClassPass, images: ImagePass | None) -> Figure:
    numbers, pictures = read.task == "regression", images and Pictures(images)
    rows = [
        (
            render("train/report/example.html", example=example, pictures=pictures),
            _with_probability(example.true, example.probability_of_true),
            _with_probability(example.predicted, example.probability),
            number(example.loss),
        )
        for example in read.examples
    ]
    heads = (read.unit, "true", "predicted", "squared error" if numbers else "loss")
    caption = "Without augmentation."
    if images is None:
        caption = "Texts as the model reads them; long ones are cut off here."
    if not numbers:
        caption += " In brackets: the probability according to the model."
    return Figure(
        heading=f"The {read.unit}s with the largest loss",
        body=Table(heads=heads, rows=rows, names=3),
        caption=caption,
        wide=True,
    )


def _with_probability(name: str, probability: float | None) -> Markup:
    return visible(name) + ("" if probability is None else f" ({number(probability, 3)})")


@dataclass(frozen=True, kw_only=True)
class ShownLevel:
    """A level of a layer and the classes, as shown on a page."""

    title: str
    level: LevelByClass
    is_open: bool
    matrix: Figure | None
    leaning: Figure | None
    """None if too few tokens were read."""


def levels_by_class(report: Report) -> list[ShownLevel]:
    """The levels of all layers whose experts were counted by class."""
    found, by_class = [], report.read.by_class
    titles = {layer.name: layer.title for layer in report.routed}
    for place, (name, levels) in enumerate(by_class.items()):
        for depth, level in enumerate(levels):
            title = titles[name] + (f", level {depth}" if len(levels) > 1 else "")
            found.append(
                ShownLevel(
                    title=title.capitalize(),
                    level=level,
                    is_open=place == 0 or len(by_class) <= FEW_LAYERS,
                    matrix=level_matrix(level, by_expert=True),
                    leaning=_leaning(level),
                )
            )
    return found


def summary_of_classes(levels: Sequence[ShownLevel], unit: str) -> Figure:
    """Table of how much a token's expert reveals about its class, with a row for each level."""
    rows = []
    for each in levels:
        said, lift = "–", "–"
        for most in each.level.leaning(1):
            said, lift = f"expert {most.expert} to {most.group}", f"{most.lift:.2f}"
        bits = (f"{each.level.information:.4f}", f"{each.level.by_chance:.4f}")
        rows.append((each.title, *bits, said, lift))
    heads = ("layer", "I(E; Y), bits", "by chance", "most specialized", "lift")
    return Figure(
        heading="How much an expert reveals about the class",
        body=Table(heads=heads, rows=rows),
        caption=f"Mutual information of a token's expert and its class. By chance: the mean after "
        f"{SHUFFLES} shuffles of the labels among the {unit}s; values at or below chance are "
        f"meaningless.",
        wide=True,
    )


def _leaning(level: LevelByClass) -> Figure | None:
    many = len(level.groups) > FEW_CLASSES
    leaning = level.of_each_group() if many else level.leaning(MOST_LEANING)
    if not leaning:
        return None
    heading = "Experts most specialized in a class"
    if many:
        heading = "The expert most specialized in each class"
    heads = ("expert", "class", "tokens", "share of the class", "share of all", "lift")
    rows = [_lean_row(each) for each in leaning]
    return Figure(
        heading=heading,
        body=Table(heads=heads, rows=rows, names=2, by_class=True),
        caption=f"Sorted by lift, highest first, where at least {LEAST_EXPECTED:g} tokens are "
        "expected "
        "by chance.",
        wide=True,
    )


def _lean_row(lean: Lean) -> tuple[str, ...]:
    shares = (f"{100 * share:.1f}%" for share in (lean.share, lean.share_of_all))
    return lean.expert, lean.group, number(lean.tokens), *shares, f"{lean.lift:.2f}"
