"""A report as one HTML page that needs nothing beside itself: no script, no font, no network."""

from collections.abc import Collection, Iterator
from html import escape

from polyad.train.measures.registry import MEASURES
from polyad.train.page.charts import WIDE, Line, legend, line_chart, number
from polyad.train.page.html import TABLE_CSS, figure
from polyad.train.page.style import CSS
from polyad.train.report.by_class_page import by_class_section
from polyad.train.report.classes_page import class_section, class_title
from polyad.train.report.content import Report
from polyad.train.report.history import Series
from polyad.train.report.image_page import image_style
from polyad.train.report.layers import layers_section, layers_title, maximum_entropy

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


FLUCTUATION = (
    (
        "top1",
        "Tokens whose first expert changed",
        "Share of the probe set, since the checkpoint before.",
    ),
    (
        "set",
        "Tokens whose experts changed",
        "Share of the probe set that uses other experts, in whatever order, than at the checkpoint "
        "before.",
    ),
    (
        "entropy_ratio",
        "Entropy of routing, over that of the checkpoint before",
        "Below 1: routers have become more decided.",
    ),
)
"""Measures of `polyad.train.experts.fluctuation`, with headings and captions."""


def render(report: Report) -> str:
    """The page.

    Args:
        report: what it says.

    Returns:
        HTML.
    """
    title = f"{report.run}: Polyad report"
    best = " (the best validation)" if report.is_best else ""
    measured = dict(_measured(report))
    more = TABLE_CSS if report.classes is not None or measured else ""
    more += "" if report.images is None else image_style(report.images)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{CSS}{more}</style></head>\n<body><main>\n"
        f"{_header(report, measured)}\n{_loss(report)}\n{class_section(report)}\n"
        f"{by_class_section(report)}\n{''.join(measured.values())}\n"
        f"{_over_time(report)}\n{layers_section(report)}\n"
        f"<footer>Made by <code>polyad report</code> from {escape(report.checkpoint)}{best} and "
        f"the run's metrics.jsonl.</footer>\n</main></body></html>\n"
    )


def _measured(report: Report) -> Iterator[tuple[str, str]]:
    """The sections of measures, by their names; those without one are left out."""
    titles = {layer.name: layer.title.capitalize() for layer in report.routed}
    for name, result in report.measures.items():
        kind = MEASURES[name]
        if body := result.section(titles):
            heading = f'<section id="{kind.anchor or name}"><h2>{kind.title}</h2>'
            yield name, f"{heading}{body}</section>"


def _header(report: Report, measured: Collection[str]) -> str:
    history, step = report.history, report.history.last_record["step"]
    task = report.task
    unit, in_unit = task.unit.name, f"{task.loss_unit}, " if task.loss_unit else ""
    units = history.last_record.get(f"{unit}s")
    active = report.active_parameters
    facts = [
        ("Steps", f"{step:,}", f"of {report.total_steps:,}"),
        (f"{unit.title()}s", f"{units:,}" if units else "unknown", "seen in training"),
        (
            "Parameters",
            f"{report.parameters:,}",
            f"all used by each {unit}"
            if active == report.parameters
            else f"{active:,} active per {unit}",
        ),
        ("Training loss", _or_none(history.final_loss), f"{in_unit}last 10 steps"),
        *((name, _or_none(v), small) for name, v, small in _validation(report)),
    ]
    cards = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{small}</small></dd></div>"
        for name, value, small in facts
    )
    links = [("loss", "Training")]
    if report.classes is not None:
        links.append(("classes", class_title(report.classes)))
        links += [("by-class", "Experts by class")] if report.classes.layers else []
    links += [(MEASURES[name].anchor or name, MEASURES[name].title) for name in measured]
    if report.routed:
        links += [("time", "Experts over time"), ("layers", layers_title(report))]
    nav = "".join(f'<a href="#{place}">{text}</a>' for place, text in links)
    return (
        f'<header><p class="kicker">Polyad report</p><h1>{escape(report.run)}</h1>'
        f'<p class="soft">{escape(report.kind)}</p><nav>{nav}</nav>'
        f'<dl class="facts">{cards}</dl></header>'
    )


def _validation(report: Report) -> list[tuple[str, float | None, str]]:
    facts = report.task.validation_facts(report.validation, report.most_validated)
    if report.text is not None and report.text.perplexity is not None:
        text = report.text
        what = f"of step {report.checkpoint_step:,}, on the whole {text.split} split"
        return [
            (name, *((text.perplexity, what) if name == "Perplexity" else (value, small)))
            for name, value, small in facts
        ]
    if report.validation is None or report.most_validated is None:
        return facts
    *others, (name, value, small) = facts
    return [*others, (name, value, f"{small}; <code>polyad evaluate</code> reads all of it")]


def _or_none(value: float | None) -> str:
    return "none yet" if value is None else number(value, 5)


def _loss(report: Report) -> str:
    history = report.history
    scalars, steps = history.scalars, history.steps
    lines = []
    if "loss" in scalars:  # it is in none where no loss was finite
        lines.append(Line(label="training", values=scalars["loss"], colour="var(--accent)"))
    if any(value is not None for value in scalars.get("validation_loss", [])):
        lines.append(
            Line(
                label="validation",
                values=scalars["validation_loss"],
                colour="var(--second)",
                with_points=True,
            )
        )
    each = "each step" if history.width == 1 else f"means of {history.width:,} steps"
    in_unit = f"{report.task.loss_unit}; " if report.task.loss_unit else ""
    note = f"{in_unit}{each}.".capitalize()
    skipped = history.last_record.get("skipped_steps")
    if skipped:
        note += f" {skipped:,} steps were skipped because something was not finite."
    if history.unreadable:
        note += f" {history.unreadable:,} unfinished lines of metrics.jsonl were left out."
    chart = line_chart(steps, lines, title="Loss over steps", width=WIDE)
    figures = [figure("Loss", legend(lines) + chart, note, wide=True)]
    figures += _validation_scores(report)
    for name, heading in (("learning_rate", "Learning rate"), ("grad_norm", "Gradient norm")):
        if name in scalars:
            line = Line(label=heading.lower(), values=scalars[name], colour="var(--accent)")
            chart = line_chart(steps, [line], title=f"{heading} over steps", low=0.0)
            figures.append(figure(heading, chart))
    dense = "" if report.routed else (
        f'<p class="note">This model has no experts: no part of it chooses among others for a '
        f"{report.task.unit.name}, so there is no load or entropy to show.</p>"
    )  # fmt: skip
    grid = f'<div class="grid">{"".join(figures)}</div>'
    return f'<section id="loss"><h2>Training</h2>{dense}{grid}</section>'


def _validation_scores(report: Report) -> list[str]:
    """Scores of the validations over steps, of a task that has others than a loss."""
    task, scalars = report.task, report.history.scalars
    if not task.higher_is_better or task.validation_score not in scalars:
        return []
    kept: dict[str, Series] = {task.validation_score: scalars[task.validation_score]}
    for name, values in scalars.items():
        known = name == "validation_loss" or "/" in name or values in kept.values()
        if name.startswith("validation_") and not known:
            kept[name] = values
    lines = [
        Line(
            label=name.removeprefix("validation_").replace("_", " "),
            values=values,
            colour=_depth(len(kept) - 1 - index, len(kept)) if index else "var(--second)",
            with_points=True,
        )
        for index, (name, values) in enumerate(kept.items())
    ]
    chart = line_chart(report.history.steps, lines, title="Validation score over steps")
    return [figure("Validation score", (legend(lines) if len(lines) > 1 else "") + chart)]


def _over_time(report: Report) -> str:
    if not report.routed:
        return ""
    layers = report.history.layers
    known = [layer for layer in report.routed if layer.name in layers]
    if not known:
        return (
            '<section id="time"><h2>Experts over time</h2><p class="note">metrics.jsonl has no '
            "statistics of the experts.</p></section>"
        )
    word = "router's scores" if report.is_sparse else "coefficients"
    charts = [
        ("entropy", "Evenness of each token's mixture (1 = all experts alike)",
         f"Entropy of the {word} over its maximum; 0: one expert has all of a token.", 0.0, 1.0),
        ("usage_entropy", "Evenness of expert use (1 = all equal)",
         f"Entropy of the mean {word} over its maximum; 0: all tokens go to one.", 0.0, 1.0),
        ("effective_experts", "Effective experts of a token",
         "Mean of exp(entropy): how many experts share a token.", None, None),
        ("load_max", "Load of the busiest expert",
         "Times the mean load; 1 is even.", None, None),
        ("unused", "Share of unused experts",
         "Those with a load of exactly 0 in a whole step.", 0.0, None),
        ("dominated", "Tokens with a dominant expert (load at a ≥ 0.5)",
         "Share of the tokens of which one expert has at least half.", 0.0, None),
        ("dropped", "Assignments dropped", "Share of those above the capacity.", 0.0, None),
    ]  # fmt: skip
    figures = []
    for measure, heading, caption, low, high in charts:
        lines = []
        for index, layer in enumerate(known):
            values = layers[layer.name].scalars.get(measure)
            if values is None:
                continue
            if measure in ("entropy", "usage_entropy"):
                values = _scaled(values, 1 / maximum_entropy(layer))
            lines.append(
                Line(
                    label=layer.title,
                    values=values,
                    colour=_depth(index, len(known)),
                )
            )
        if not lines or (measure == "dropped" and not any(any(x.values) for x in lines)):
            continue
        chart = line_chart(report.history.steps, lines, title=heading, low=low, high=high)
        figures.append(
            figure(heading, (legend(lines) if len(lines) <= 16 else "") + chart, caption)
        )
    figures += fluctuation_figures(report)
    order = "" if len(known) <= 16 else " Darker (in the dark scheme: lighter) curves are deeper."
    return (
        '<section id="time"><h2>Experts over time</h2><p class="note">One curve a layer, measured '
        f"on the training tokens of every step.{order}</p>"
        f'<div class="grid">{"".join(figures)}</div></section>'
    )


def fluctuation_figures(report: Report) -> list[str]:
    """How routing changed from checkpoint to checkpoint; nothing where a run did not log it.

    Args:
        report: what the page says.
    """
    figures = []
    for measure, heading, caption in FLUCTUATION:
        values = report.history.scalars
        named = [(x.title, f"fluctuation/{x.name}/{measure}") for x in report.routed]
        found = [(label, key) for label, key in named if key in values]
        lines = [
            Line(label=label, values=values[key], colour=_depth(i, len(found)), with_points=True)
            for i, (label, key) in enumerate(found)
        ]
        if len(found) > 1:
            mean = values.get(f"fluctuation/{measure}", [])
            lines.append(Line(label="mean", values=mean, colour="var(--second)", with_points=True))
        if lines:
            chart = line_chart(
                report.history.steps, lines, title=heading, low=None if "ratio" in measure else 0.0
            )
            figures.append(
                figure(heading, (legend(lines) if len(lines) <= 17 else "") + chart, caption)
            )
    return figures


def _scaled(values: Series, factor: float) -> Series:
    return [None if value is None else min(1.0, value * factor) for value in values]


def _depth(index: int, count: int) -> str:
    share = round(100 * index / max(1, count - 1))
    return f"color-mix(in oklab, var(--deep) {share}%, var(--shallow))"
