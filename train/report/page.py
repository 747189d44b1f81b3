"""A report as one HTML page that needs nothing beside itself: no script, no font, no network."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from train.report.charts import WIDE, Line, heat_legend, heat_map, legend, line_chart, number
from train.report.coefficients import RoutedLayer
from train.report.content import ExpertReport, Report, Snippet
from train.report.history import LayerHistory, Series
from train.report.snippets import Piece
from train.report.style import CSS
from train.report.top_tokens import STRETCH

MAX_ROWS = 256
"""Rows of a heat map; more experts share them."""
IN_ORDER = 32
"""Up to so many experts stand in the order of their numbers, more in that of their load."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(report: Report) -> str:
    """The page.

    Args:
        report: what it says.

    Returns:
        HTML.
    """
    title = f"{report.run}: Polyad report"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n"
        f"{_header(report)}\n{_loss(report)}\n{_over_time(report)}\n{_layers(report)}\n"
        f"<footer>Made by <code>polyad report</code> from {escape(report.checkpoint)} and the "
        f"run's metrics.jsonl.</footer>\n</main></body></html>\n"
    )


def _header(report: Report) -> str:
    history, step = report.history, report.history.last_record["step"]
    tokens, validation = history.last_record.get("tokens"), report.validation_loss
    active = report.active_parameters
    facts = [
        ("Steps", f"{step:,}", f"of {report.total_steps:,}"),
        ("Tokens", f"{tokens:,}" if tokens else "unknown", "seen in training"),
        (
            "Parameters",
            f"{report.parameters:,}",
            f"{active:,} of one token" if active != report.parameters else "all used by a token",
        ),
        ("Training loss", _or_none(history.final_loss), "nats a token, last 10 steps"),
        ("Validation loss", _or_none(validation), "nats a token, newest"),
        (
            "Perplexity",
            _or_none(None if validation is None else math.exp(min(validation, 700))),
            "of that validation",
        ),
    ]
    cards = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{small}</small></dd></div>"
        for name, value, small in facts
    )
    links = [("loss", "Loss")]
    if report.routed:
        links += [("time", "Experts over time"), ("layers", "Layers and top tokens")]
    nav = "".join(f'<a href="#{place}">{text}</a>' for place, text in links)
    return (
        f'<header><p class="kicker">Polyad report</p><h1>{escape(report.run)}</h1>'
        f'<p class="soft">{escape(report.kind)}</p><nav>{nav}</nav>'
        f'<dl class="facts">{cards}</dl></header>'
    )


def _or_none(value: float | None) -> str:
    return "none yet" if value is None else number(value, 5)


def _figure(heading: str, body: str, caption: str = "", *, wide: bool = False) -> str:
    css = ' class="wide"' if wide else ""
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure{css}><h3>{escape(heading)}</h3>{body}{below}</figure>"


def _loss(report: Report) -> str:
    history = report.history
    scalars, steps = history.scalars, history.steps
    lines = [Line(label="training", values=scalars.get("loss", []), colour="var(--accent)")]
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
    note = f"Nats a token; {each}."
    skipped = history.last_record.get("skipped_steps")
    if skipped:
        note += f" {skipped:,} steps were skipped because something was not finite."
    if history.unreadable:
        note += f" {history.unreadable:,} unfinished lines of metrics.jsonl were left out."
    chart = line_chart(steps, lines, title="Loss over steps", width=WIDE)
    figures = [_figure("Loss", legend(lines) + chart, note, wide=True)]
    for name, heading in (("learning_rate", "Learning rate"), ("grad_norm", "Gradient norm")):
        if name in scalars:
            line = Line(label=heading.lower(), values=scalars[name], colour="var(--accent)")
            chart = line_chart(steps, [line], title=f"{heading} over steps", low=0.0)
            figures.append(_figure(heading, chart))
    dense = "" if report.routed else (
        '<p class="note">This model has no experts: no part of it chooses among others for a '
        "token, so there is no load, entropy or top token to show.</p>"
    )  # fmt: skip
    grid = f'<div class="grid">{"".join(figures)}</div>'
    return f'<section id="loss"><h2>Loss</h2>{dense}{grid}</section>'


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
        ("entropy", f"Entropy of the {word}, over its maximum",
         "1: every expert alike; 0: one expert has all of a token.", 0.0, 1.0),
        ("effective_experts", "Effective experts of a token",
         "Mean of exp(entropy): how many experts share a token.", None, None),
        ("load_max", "Load of the busiest expert",
         "Times the mean load; 1 is even.", None, None),
        ("unused", "Experts that a step never used",
         "Share of the experts with a load of exactly 0 in a whole step.", 0.0, None),
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
            if measure == "entropy":
                values = _scaled(values, 1 / _maximum_entropy(layer))
            lines.append(
                Line(
                    label=f"block {layer.block}",
                    values=values,
                    colour=_depth(index, len(known)),
                )
            )
        if not lines or (measure == "dropped" and not any(any(x.values) for x in lines)):
            continue
        chart = line_chart(report.history.steps, lines, title=heading, low=low, high=high)
        figures.append(
            _figure(heading, (legend(lines) if len(lines) <= 16 else "") + chart, caption)
        )
    order = "" if len(known) <= 16 else " Darker (in the dark scheme: lighter) curves are deeper."
    return (
        '<section id="time"><h2>Experts over time</h2><p class="note">One curve a layer, measured '
        f"on the training tokens of every step.{order}</p>"
        f'<div class="grid">{"".join(figures)}</div></section>'
    )


def _maximum_entropy(layer: RoutedLayer) -> float:
    return math.log(max(2, math.prod(layer.levels)))


def _scaled(values: Series, factor: float) -> Series:
    return [None if value is None else min(1.0, value * factor) for value in values]


def _depth(index: int, count: int) -> str:
    share = round(100 * index / max(1, count - 1))
    return f"color-mix(in oklab, var(--deep) {share}%, var(--shallow))"


def _layers(report: Report) -> str:
    if not report.routed:
        return ""
    word = "routing weight" if report.is_sparse else "coefficient"
    parts = []
    if report.text is not None:
        text = report.text
        parts.append(
            f'<p class="note">Load over time is of training. Top tokens: of {text.tokens:,} of the '
            f"{text.of_tokens:,} tokens of the {escape(text.split)} split of "
            f"{escape(text.data)}, with the weights of step {report.checkpoint_step:,}; at most "
            f"one of {STRETCH} tokens in a row. Unless experts were named, half of those shown are "
            f"the ones that most often have at least half of a token (a ≥ 0.5); the others stand "
            f"at equal distances in the order of load, down to a twentieth of the mean.</p>"
            f'<p class="note">The token that counts has a frame. The colour behind every token is '
            f'its own {word} for that expert: <span class="scale">0 <i></i> 1</span></p>'
        )
    for number_, layer in enumerate(report.routed):
        parts.append(_layer(report, layer, is_open=number_ == 0 or len(report.routed) <= 4))
    return f'<section id="layers"><h2>Layers and top tokens</h2>{"".join(parts)}</section>'


def _layer(report: Report, layer: RoutedLayer, *, is_open: bool) -> str:
    history = report.history.layers.get(layer.name, LayerHistory())
    experts = report.text.layers.get(layer.name, []) if report.text else []
    body = _load_figures(report, layer, history)
    if experts:
        body += f'<div class="experts">{"".join(_expert(expert) for expert in experts)}</div>'
    elif report.text is not None:
        body += (
            f'<p class="note">No experts of this layer were read; --layers {layer.block} shows '
            f"them.</p>"
        )
    said = [" × ".join(f"{size:,}" for size in layer.levels) + " experts"]
    entropy = history.last("entropy")
    if entropy is not None:
        said.append(f"entropy {100 * entropy / _maximum_entropy(layer):.0f}% of its maximum")
    for measure, form in (
        ("effective_experts", "{:.1f} effective experts"),
        ("load_max", "busiest {:.2f} times the mean"),
    ):
        value = history.last(measure)
        if value is not None:
            said.append(form.format(value))
    unused = history.last("unused")
    if unused is not None:
        said.append(f"{100 * unused:.0f}% unused")
    facts = "".join(f"<span>{escape(fact)}</span>" for fact in said)
    return (
        f'<details class="layer"{" open" if is_open else ""}><summary><b>Block {layer.block}</b>'
        f'{facts}</summary><div class="inside">{body}</div></details>'
    )


def _load_figures(report: Report, layer: RoutedLayer, history: LayerHistory) -> str:
    rows = history.lists.get("load")
    width = sum(layer.levels)
    known = [row for row in rows or [] if row is not None and row.size == width]
    if rows is None or not known:
        return '<p class="note">metrics.jsonl has no load of single experts of this layer.</p>'
    unknown = np.full(width, np.nan)
    table = []
    for row in rows:  # a span without a record keeps the last one known
        unknown = row if row is not None and row.size == width else unknown
        table.append(unknown)
    load_SC = np.stack(table, axis=1)
    if np.isnan(load_SC[:, 0]).all():
        load_SC = np.where(np.isnan(load_SC), known[0][:, None], load_SC)
    figures, first = [], 0
    for level, size in enumerate(layer.levels):
        relative_RC = size * load_SC[first : first + size]
        heading = "Load over time" if len(layer.levels) == 1 else f"Load over time, level {level}"
        figures.append(_load_figure(report, relative_RC, heading))
        first += size
    return heat_legend() + "".join(figures)


def _load_figure(report: Report, relative_RC: "np.ndarray[tuple[int, int], np.dtype[np.float64]]",
                 heading: str) -> str:  # fmt: skip
    size = relative_RC.shape[0]
    order = np.arange(size)
    if size > IN_ORDER:
        order = np.argsort(-relative_RC[:, -1], kind="stable")
    groups = np.array_split(order, min(size, MAX_ROWS))
    names = [_row_name([int(e) for e in group], relative_RC[group, -1].mean()) for group in groups]
    shown_RC = np.stack([relative_RC[group].mean(0) for group in groups])
    sorted_by = "by number" if size <= IN_ORDER else "by their newest load, the busiest on top"
    shared = f"; {math.ceil(size / MAX_ROWS)} experts share a row" if size > MAX_ROWS else ""
    chart = heat_map(report.history.steps, shown_RC, names, title=heading)
    return _figure(heading, chart, f"A row an expert{shared}, sorted {sorted_by}.")


def _row_name(experts: Sequence[int], load: float) -> str:
    which = f"expert {experts[0]}" if len(experts) == 1 else f"experts {experts[0]}, ..."
    return f"{which}: newest load {number(float(load), 3)} times the mean"


def _expert(expert: ExpertReport) -> str:
    facts = (
        f"load {number(expert.load, 3)} times the mean, in {100 * expert.active:.1f}% of the "
        f"tokens, at least 0.5 in {100 * expert.dominant:.2f}%"
    )
    tops = "".join(_snippet(snippet) for snippet in expert.snippets)
    body = f'<ol class="tops">{tops}</ol>' if tops else '<p class="note">No token used it.</p>'
    return (
        f'<div class="expert"><h3>Expert {escape(expert.name)}<span>{facts}</span></h3>{body}</div>'
    )


def _snippet(snippet: Snippet) -> str:
    place = snippet.place
    text = "".join(_piece(piece) for piece in _trimmed(snippet.pieces))
    return (
        f'<li><div class="where"><b>{snippet.coefficient:.3f}</b><span>document '
        f"{place.document:,}, token {place.offset:,}</span></div><pre>{text}</pre></li>"
    )


def _trimmed(pieces: list[Piece]) -> list[Piece]:
    """Without white space at both ends, unless it is what the snippet is about."""
    shown = [i for i, piece in enumerate(pieces) if piece.is_peak or piece.text.strip()]
    return pieces[shown[0] : shown[-1] + 1] if shown else pieces


def _piece(piece: Piece) -> str:
    text = _visible(piece.text)
    highest = max(piece.coefficients)
    if highest <= 0 and not piece.is_peak:
        return text
    title = ", ".join(f"{a:.3f}" for a in piece.coefficients)
    css = ' class="peak"' if piece.is_peak else ""
    return f'<mark{css} style="--a:{min(1.0, highest):.2f}" title="{title}">{text}</mark>'


def _visible(text: str) -> str:
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
