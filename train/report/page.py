"""A report as one self-contained HTML page, without external fonts or network access.

The page is complete without scripts; a short one sorts and searches the list of experts. The page
is the template `report.html`; here are its facts, and the charts over all of training.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from polyad.train.experts.probing import RoutedLayer
from polyad.train.measures.knockout import MOST_CLASSES
from polyad.train.measures.registry import MEASURES
from polyad.train.page.charts import WIDE, Line, line_chart
from polyad.train.page.html import Figure
from polyad.train.page.matrices import heat_legend
from polyad.train.page.template import number, page
from polyad.train.report.class_figures import (
    class_figures,
    class_note,
    levels_by_class,
    summary_of_classes,
)
from polyad.train.report.content import Report
from polyad.train.report.history import Series
from polyad.train.report.layers import Pictures, maximum_entropy, shown_layers
from polyad.train.report.lines import MOST_WORDS, expert_lines
from polyad.train.report.top_tokens import STRETCH

MANY_LINES = 16
"""Maximum number of lines of a chart of layers with a legend."""
"""Note on a training loss that is not a prediction loss."""
OVER_TIME = (
    ("entropy", "Evenness of each token's mixture (1 = all experts alike)",
     "Entropy of the {word} of a token, divided by its maximum; 0: a single expert gets the whole "
     "token.", 0.0, 1.0),
    ("usage_entropy", "Evenness of expert use (1 = all equal)",
     "Entropy of the mean {word}, divided by its maximum; 0: all tokens go to one expert.",
     0.0, 1.0),
    ("effective_experts", "Effective experts per token",
     "Mean of exp(entropy), the effective number of experts that share a token.", None, None),
    ("active", "Active experts per token",
     "Mean number of experts with a weight above 0.", 0.0, None),
    ("load_max", "Load of the busiest expert",
     "As a multiple of the mean load; 1 means even load.", None, None),
    ("unused", "Share of unused experts",
     "Share of experts that get no token in a whole step.", 0.0, None),
    ("dominated", "Tokens with a dominant expert",
     "Share of the tokens for which one expert has a coefficient of at least 0.5.", 0.0, None),
    ("dropped", "Dropped assignments",
     "Share of the assignments that exceed the experts' capacity.", 0.0, None),
)  # fmt: skip
"""Routing statistics of a step, with headings, captions, and axis limits."""
FLUCTUATION = (
    ("top1", "Tokens whose first expert changed",
     "Share of the probe tokens, since the previous checkpoint.", 0.0),
    ("set", "Tokens whose experts changed",
     "Share of the probe tokens that use a different set of experts than at the previous "
     "checkpoint.", 0.0),
    ("entropy_ratio", "Routing entropy, relative to the previous checkpoint",
     "Below 1: routing has become more confident.", None),
)  # fmt: skip
"""Measures of `polyad.train.experts.fluctuation`, with headings, captions, and lower axis limit."""


def render_report(report: Report) -> str:
    """Renders the page.

    Args:
        report: its content.

    Returns:
        HTML.
    """
    titles = {layer.name: layer.title.capitalize() for layer in report.routed}
    measured = [
        (MEASURES[name].anchor or name, MEASURES[name].title, parts)
        for name, result in report.read.measures.items()
        if (parts := [*result.section(titles)])
    ]
    script = Path(__file__).with_name("report.js").read_text(encoding="utf-8")
    lines = expert_lines(report)
    in_order = [x.anchor(x.expert_name(n)) for x in report.routed for n in range(x.num_experts)]
    classes, images, by_class = report.read.classes, report.read.images, levels_by_class(report)
    return page(
        "train/report/report.html",
        report=report,
        facts=facts(report),
        lines=lines,
        most_words=MOST_WORDS,
        places={anchor: place for place, anchor in enumerate(in_order)},
        script=Markup(script),
        script_digest=_digest(script),
        training=training_figures(report),
        class_note=classes and class_note(classes),
        classes=classes and class_figures(classes, images),
        by_class=by_class,
        summary_of_classes=classes and summary_of_classes(by_class, classes.unit),
        measured=measured,
        over_time=over_time_figures(report),
        without_legend=len(_recorded(report)) > MANY_LINES,
        layers=shown_layers(report),
        heat_legend=heat_legend(),
        pictures=images and Pictures(images),
        has_dominant=any(
            expert.dominant > 0
            for read in (report.read.text, images)
            if read is not None
            for experts in read.layers.values()
            for expert in experts
        ),
        stretch=STRETCH,
        most_classes=MOST_CLASSES,
    )


def _digest(script: str) -> str:
    """Hash of the only script that the page's content security policy allows."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def facts(report: Report) -> list[tuple[str, str, str]]:
    """Facts in the head of the page: names, values, and descriptions."""
    history, task = report.history, report.task
    unit, in_unit = task.unit.name, f"{report.loss_unit}, " if report.loss_unit else ""
    units, active = history.last_record.get(f"{unit}s"), report.active_parameters
    used = f"{active:,} active per token"
    if active == report.parameters:
        used = "all active for every token"
    size = ("Parameters", f"{report.parameters:,}", used)
    if not history.steps:  # weights without a run
        known = [each for each in _validation(report) if each[1] is not None]
        return [size, *((name, _or_none(value), small) for name, value, small in known)]
    return [
        ("Steps", f"{history.last_record['step']:,}", f"of {report.total_steps:,}"),
        (f"{unit.title()}s", f"{units:,}" if units else "unknown", "seen in training"),
        size,
        (
            "Training loss",
            _or_none(history.final_loss),
            f"{in_unit}last 10 steps",
        ),
        *((name, _or_none(value), small) for name, value, small in _validation(report)),
    ]


def _validation(report: Report) -> list[tuple[str, float | None, str]]:
    found = report.task.validation_facts(report.validation, report.most_validated)
    text = report.read.text
    if text is not None and text.perplexity is not None:
        what = f"{report.of_weights}, on the whole {text.split} split"
        return [
            (name, text.perplexity, what) if name == "Perplexity" else (name, value, small)
            for name, value, small in found
        ]
    if report.validation is None or report.most_validated is None:
        return found
    *others, (name, value, small) = found
    more = Markup("{}; <code>polyad evaluate</code> scores the whole split").format(small)
    return [*others, (name, value, more)]


def _or_none(value: float | None) -> str:
    return "not yet" if value is None else number(value, 5)


def training_figures(report: Report) -> list[Figure]:
    """Figures of losses, scores, the learning rate and gradient norms over steps."""
    history = report.history
    scalars, steps = history.scalars, history.steps
    if not steps:
        return []
    lines = []
    if "loss" in scalars:  # missing if no loss was finite
        lines.append(Line(label="training", values=scalars["loss"], colour="var(--accent)"))
    validated = []
    if any(value is not None for value in scalars.get("validation_loss", [])):
        validated = [_marked("validation", scalars["validation_loss"], "var(--second)")]
    is_other = report.loss_unit != report.task.loss_unit  # differs from that of the training loss
    if not is_other:
        lines += validated
    each = "each step" if history.width == 1 else f"averaged over {history.width:,} steps"
    note = f"{report.loss_unit}; {each}." if report.loss_unit else f"{each}."
    note = note if is_other else note.capitalize()
    if skipped := history.last_record.get("skipped_steps"):
        note += f" {skipped:,} steps were skipped because a loss or gradient was not finite."
    if history.unreadable:
        note += f" {history.unreadable:,} incomplete lines of metrics.jsonl were ignored."
    chart = line_chart(steps, lines, title="Loss over steps", width=WIDE)
    figures = [Figure(heading="Loss", body=chart, caption=note, legend=lines, wide=True)]
    if is_other and validated:
        chart = line_chart(steps, validated, title="Validation loss over steps")
        unit = report.task.loss_unit
        figures.append(
            Figure(heading="Validation loss", body=chart, caption=f"{unit}.".capitalize())
        )
    figures += _validation_scores(report)
    for name, heading in (("learning_rate", "Learning rate"), ("grad_norm", "Gradient norm")):
        if name in scalars:
            line = Line(label=heading.lower(), values=scalars[name], colour="var(--accent)")
            chart = line_chart(steps, [line], title=f"{heading} over steps", low=0.0)
            figures.append(Figure(heading=heading, body=chart))
    return figures


def _validation_scores(report: Report) -> list[Figure]:
    """Figures of validation scores over steps, for tasks with scores other than a loss."""
    task, scalars = report.task, report.history.scalars
    if not task.higher_is_better or task.validation_score not in scalars:
        return []
    kept: dict[str, Series] = {task.validation_score: scalars[task.validation_score]}
    for name, values in scalars.items():
        known = name == "validation_loss" or "/" in name or values in kept.values()
        if name.startswith("validation_") and not known:
            kept[name] = values
    lines = [
        _marked(
            name.removeprefix("validation_").replace("_", " "),
            values,
            _depth(len(kept) - 1 - index, len(kept)) if index else "var(--second)",
        )
        for index, (name, values) in enumerate(kept.items())
    ]
    chart = line_chart(report.history.steps, lines, title="Validation score over steps")
    legend = lines if len(lines) > 1 else ()
    return [Figure(heading="Validation score", body=chart, legend=legend)]


def _recorded(report: Report) -> list[RoutedLayer]:
    """The layers with statistics in the records."""
    return [layer for layer in report.routed if layer.name in report.history.layers]


def over_time_figures(report: Report) -> list[Figure]:
    """Figures of the routing of all layers over steps."""
    layers, known = report.history.layers, _recorded(report)
    if not known:
        return []
    word = "router's scores" if report.is_sparse else "coefficients"
    figures = []
    for measure, heading, caption, low, high in OVER_TIME:
        lines = []
        for index, layer in enumerate(known):
            values = layers[layer.name].scalars.get(measure)
            if values is None:
                continue
            if measure in ("entropy", "usage_entropy"):
                values = _scaled(values, 1 / maximum_entropy(layer))
            colour = _depth(index, len(known))
            few = None in values  # few steps have routing records
            lines.append(Line(label=layer.title, values=values, colour=colour, with_points=few))
        if measure == "dropped" and not any(any(line.values) for line in lines):
            continue
        if lines:
            chart = line_chart(report.history.steps, lines, title=heading, low=low, high=high)
            legend = lines if len(lines) <= MANY_LINES else ()
            caption = caption.format(word=word)
            figures.append(Figure(heading=heading, body=chart, caption=caption, legend=legend))
    return figures + _fluctuation_figures(report)


def _fluctuation_figures(report: Report) -> list[Figure]:
    """Figures of routing changes between checkpoints; empty if the run did not log them."""
    figures, scalars = [], report.history.scalars
    for measure, heading, caption, low in FLUCTUATION:
        named = [(x.title, f"fluctuation/{x.name}/{measure}") for x in report.routed]
        found = [(label, scalars[key]) for label, key in named if key in scalars]
        lines = [
            _marked(label, values, _depth(index, len(found)))
            for index, (label, values) in enumerate(found)
        ]
        if len(found) > 1:
            mean = scalars.get(f"fluctuation/{measure}", [])
            lines.append(_marked("mean", mean, "var(--second)"))
        if lines:
            chart = line_chart(report.history.steps, lines, title=heading, low=low)
            legend = lines if len(lines) <= MANY_LINES + 1 else ()
            figures.append(Figure(heading=heading, body=chart, caption=caption, legend=legend))
    return figures


def _marked(label: str, values: Sequence[float | None], colour: str) -> Line:
    return Line(label=label, values=values, colour=colour, with_points=True)


def _scaled(values: Series, factor: float) -> Series:
    return [None if value is None else min(1.0, value * factor) for value in values]


def _depth(index: int, count: int) -> str:
    """A color between those of the first and the last layer."""
    share = round(100 * index / max(1, count - 1))
    return f"color-mix(in oklab, var(--deep) {share}%, var(--shallow))"
