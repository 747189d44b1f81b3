"""The part of a page about classes: scores, confusions, and the samples with the largest loss."""

from html import escape

from polyad.train.experts.by_class import FEW_CLASSES
from polyad.train.page.charts import NARROW_COLUMNS, Cell, matrix_chart, number
from polyad.train.page.html import figure, figure_of_table, long_table, table, visible
from polyad.train.report.classes import ClassPass, Example
from polyad.train.report.content import Report
from polyad.train.report.image_page import picture
from polyad.train.report.top_images import ImagePass
from polyad.train.tasks.scores import TITLES


def class_title(read: ClassPass) -> str:
    """The heading of the section."""
    return "Predictions" if not read.scores else "Classes"


def class_section(report: Report) -> str:
    """Scores of each class, confusions and examples; nothing where none were read.

    Args:
        report: what the page says.

    Returns:
        HTML.
    """
    read = report.classes
    if read is None:
        return ""
    figures = [_scores(read), _confusion(read), _examples(read, report.images)]
    return (
        f'<section id="classes"><h2>{class_title(read)}</h2>'
        f'<p class="note">{_note(report, read)}</p>'
        f'<div class="grid">{"".join(figures)}</div></section>'
    )


def _note(report: Report, read: ClassPass) -> str:
    titles, names = dict(TITLES), list(read.held)
    if len(names) > 1:
        titles["f1"] = f"F1 of {escape(names[1])}"
    metrics = ", ".join(f"{titles[name]} {value:.4f}" for name, value in read.metrics.items())
    which = " (the best validation of the run)" if report.is_best else ""
    loss = "squared error" if read.task == "regression" else "loss"
    said = (
        f"{read.samples:,} of the {read.of_samples:,} {read.unit}s of the {escape(read.split)} "
        f"split of {escape(read.data)}, with the weights of step {report.checkpoint_step:,}"
        f"{which}: {metrics}, {loss} {read.loss:.4f}."
    )
    if read.task == "multiple_choice":
        said += " What stands for a class is the place of the right choice among the others."
    return said


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _scores(read: ClassPass) -> str:
    if not read.scores:
        return ""
    many = len(read.scores) > FEW_CLASSES
    order = list(read.scores)
    if many:  # what has neither a sample nor a prediction comes last
        order.sort(
            key=lambda name: (
                *(read.scores[name].f1 is None, read.scores[name].f1 or 0.0),
                -read.held[name],
            )
        )
    rows = []
    for name in order:
        score, held = read.scores[name], read.held[name]
        shares = [_share(value) for value in (score.precision, score.recall, score.f1)]
        counts = [f"{value:,}" for value in (held, score.predicted, score.right)]
        rows.append([escape(name), *counts, *shares])
    heads = ("class", f"{read.unit}s", "predicted", "right", "precision", "recall", "F1")
    body = long_table(heads, rows)
    caption = (
        "The lowest F1 first, of equal ones the class with most samples."
        if many
        else "In the order of the classes."
    )
    return figure_of_table("Scores of each class", body, caption, wide=len(rows) > NARROW_COLUMNS)


def _confusion(read: ClassPass) -> str:
    if read.matrix_KK is None:
        if not read.confusions:
            return ""
        rows = [
            [
                *(escape(name) for name in (each.true, each.predicted)),
                *(f"{each.samples:,}", f"{100 * each.samples / read.held[each.true]:.0f}%"),
            ]
            for each in read.confusions
        ]
        heads = ("true", "predicted", f"{read.unit}s", "of the true class")
        return figure_of_table("Most frequent confusions", table(heads, rows, names=2), wide=True)
    names = list(read.scores)
    cells = []
    for t, true in enumerate(names):
        held = max(1, read.held[true])
        cells.append([
            Cell(
                f"{count:,}",
                f"true {true}, predicted {found}: {count:,} of {read.held[true]:,} "
                f"({100 * count / held:.0f}%)",
                count / held,
                "var(--accent)" if p == t else "var(--second)",
            )
            for p, (found, count) in enumerate(
                zip(names, read.matrix_KK[t].tolist(), strict=True)
            )
        ])  # fmt: skip
    return figure(
        "Confusion",
        matrix_chart(names, names, cells, title="Confusion matrix"),
        "A row is a true class, a column a predicted one; the colour is the share of the row.",
        wide=len(names) > NARROW_COLUMNS,
    )


def _examples(read: ClassPass, images: ImagePass | None) -> str:
    if not read.examples:
        return ""
    numbers = read.task == "regression"
    rows = [
        [
            _shown(example, images),
            _with_probability(example.true, example.probability_of_true),
            _with_probability(example.predicted, example.probability),
            number(example.loss),
        ]
        for example in read.examples
    ]
    heads = (read.unit, "true", "predicted", "squared error" if numbers else "loss")
    caption = (
        "Texts as the model reads them, cut off where they are long."
        if images is None
        else "Without augmentation."
    ) + ("" if numbers else " In brackets the probability that the model gives.")
    heading = f"The {read.unit}s with the largest loss"
    return figure_of_table(heading, table(heads, rows, names=3), caption, wide=True)


def _shown(example: Example, images: ImagePass | None) -> str:
    where = f'<div class="where"><span>number {example.number:,}</span></div>'
    if images is not None:
        return picture(images, example.number) + where
    return where + "".join(f"<pre>{visible(text.strip())}</pre>" for text in example.texts)


def _with_probability(name: str, probability: float | None) -> str:
    return visible(name) + ("" if probability is None else f" ({number(probability, 3)})")
