"""The part of a page about single layers: load over time, and experts with their top tokens."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from polyad.train.experts.probing import EVERY, RoutedLayer
from polyad.train.measures.knockout import knockout_note, without_expert
from polyad.train.page.charts import (
    WIDE,
    Line,
    heat_legend,
    heat_map,
    legend,
    line_chart,
    number,
)
from polyad.train.page.html import figure, visible
from polyad.train.report.content import ExpertReport, Report, Snippet
from polyad.train.report.history import History, LayerHistory, Series
from polyad.train.report.image_page import image_layer, image_note
from polyad.train.report.snippets import Piece
from polyad.train.report.top_tokens import STRETCH

MAX_ROWS = 256
"""Rows of a heat map; more experts share them."""
IN_ORDER = 32
"""Up to so many experts stand in the order of their numbers, more in that of their load."""


SWITCH = (
    '<input type="checkbox" id="every-token" autocomplete="off"><label for="every-token">'
    "Show the highest of all tokens, also of those that are only punctuation or white space"
    "</label>"
)
"""The style sheet does what it says: `words-only` is hidden while it is checked, `all-only` while
it is not."""


def maximum_entropy(layer: RoutedLayer) -> float:
    """The largest entropy that a token's coefficients can have over all leaves, in nats."""
    return math.log(max(2, math.prod(layer.levels)))


def layers_title(report: Report) -> str:
    """The heading of the section."""
    return "Layers and top images" if report.images is not None else "Layers and top tokens"


def layers_section(report: Report) -> str:
    """The section, empty for a dense model.

    Args:
        report: what the page says.

    Returns:
        HTML.
    """
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
        if text.left_out is not None:
            parts.append(knockout_note(text.left_out))
        parts.append(SWITCH)
    if report.images is not None:
        parts.append(image_note(report.images, word))
    for number_, layer in enumerate(report.routed):
        parts.append(_layer(report, layer, is_open=number_ == 0 or len(report.routed) <= 4))
    return f'<section id="layers"><h2>{layers_title(report)}</h2>{"".join(parts)}</section>'


def _layer(report: Report, layer: RoutedLayer, *, is_open: bool) -> str:
    history = report.history.layers.get(layer.name, LayerHistory())
    experts = report.text.layers.get(layer.name, []) if report.text else []
    body = _kept_note(report, layer) + _load_figures(report.history, layer, history)
    body += _entropy_figure(report.history.steps, layer, history)
    if experts:
        body += f'<div class="experts">{"".join(_expert(expert) for expert in experts)}</div>'
    elif report.images is not None and layer.name in report.images.layers:
        body += image_layer(report.images, layer.name)
    elif report.text is not None or report.images is not None:
        named = layer.block if layer.in_block else EVERY
        body += (
            f'<p class="note">No experts of this layer were read; --layers {named} shows them.</p>'
        )
    said = [" × ".join(f"{size:,}" for size in layer.levels) + " experts"]
    entropy = history.last("entropy")
    if entropy is not None:
        said.append(f"entropy {100 * entropy / maximum_entropy(layer):.0f}% of its maximum")
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
    title = layer.title.capitalize()
    return (
        f'<details class="layer"{" open" if is_open else ""}><summary><b>{title}</b>'
        f'{facts}</summary><div class="inside">{body}</div></details>'
    )


def _kept_note(report: Report, layer: RoutedLayer) -> str:
    kept = report.kept.get(layer.name)
    if kept is None:
        return ""
    return (
        f'<p class="note">The groups of units that a token uses keep {100 * kept.share:.1f}% of '
        f"the activation of all units (sums of |a| over what was read). As many by chance keep "
        f"{100 * kept.chance:.1f}%, the best ones of each token {100 * kept.best:.1f}%.</p>"
    )


def _entropy_figure(steps: Sequence[int], layer: RoutedLayer, history: LayerHistory) -> str:
    """Entropy over its maximum; with several levels that of each."""
    lines = []
    if "entropy" in history.scalars:
        whole = history.scalars["entropy"]
        label = "all levels" if len(layer.levels) > 1 else "entropy"
        lines.append(_entropy_line(label, whole, maximum_entropy(layer), "var(--accent)"))
    rows = history.lists.get("level_entropy", [])
    for level, size in enumerate(layer.levels if rows else ()):
        values = [None if row is None else float(row[level]) for row in rows]
        share = round(100 * level / max(1, len(layer.levels) - 1))
        colour = f"color-mix(in oklab, var(--ink) {share}%, var(--second))"
        lines.append(_entropy_line(f"level {level}", values, math.log(max(2, size)), colour))
    if not lines:
        return ""
    chart = line_chart(steps, lines, title="Entropy over time", low=0.0, high=1.0, width=WIDE)
    named = legend(lines) if len(lines) > 1 else ""
    return figure("Entropy over time", named + chart, "Over its maximum, ln of the experts.")


def _entropy_line(label: str, values: Series, maximum: float, colour: str) -> Line:
    scaled = [None if value is None else min(1.0, value / maximum) for value in values]
    # Records of single levels may come with few of the steps: they are joined.
    return Line(label=label, values=scaled, colour=colour, with_points=label.startswith("level"))


def _load_figures(times: History, layer: RoutedLayer, history: LayerHistory) -> str:
    width = sum(layer.levels)
    known = [row for row in history.load if row is not None and row.size == width]
    if not known:
        return '<p class="note">metrics.jsonl has no load of single experts of this layer.</p>'
    unknown = np.full(width, np.nan)
    table = []
    for row in history.load:  # a column without a record of this layer keeps the last one known
        unknown = row if row is not None and row.size == width else unknown
        table.append(unknown)
    load_SC = np.stack(table, axis=1)
    if np.isnan(load_SC[:, 0]).all():
        load_SC = np.where(np.isnan(load_SC), known[0][:, None], load_SC)
    figures, first = [], 0
    for level, size in enumerate(layer.levels):
        relative_RC = size * load_SC[first : first + size]
        heading = "Load over time" if len(layer.levels) == 1 else f"Load over time, level {level}"
        figures.append(_load_figure(times, relative_RC, heading))
        first += size
    return heat_legend() + "".join(figures)


def _load_figure(times: History, relative_RC: npt.NDArray[np.float64], heading: str) -> str:
    size = relative_RC.shape[0]
    order = np.arange(size)
    if size > IN_ORDER:
        order = np.argsort(-relative_RC[:, -1], kind="stable")
    groups = np.array_split(order, min(size, MAX_ROWS))
    names = [_row_name([int(e) for e in group], relative_RC[group, -1].mean()) for group in groups]
    shown_RC = np.stack([relative_RC[group].mean(0) for group in groups])
    sorted_by = "by number" if size <= IN_ORDER else "by their newest load, the busiest on top"
    shared = f"; {math.ceil(size / MAX_ROWS)} experts share a row" if size > MAX_ROWS else ""
    chart = heat_map(times.load_steps, shown_RC, names, title=heading)
    column = "step" if times.load_width == 1 else f"{times.load_width:,} steps"
    return figure(
        heading,
        chart,
        f"A row an expert{shared}, sorted {sorted_by}; a column each {column} whose record has the "
        f"load of single experts (log.every).",
    )


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
    if tops and not any(snippet.among_words for snippet in expert.snippets):
        body += '<p class="note words-only">No token with a letter or a digit used it.</p>'
    if expert.without is not None:
        body = without_expert(expert.without) + body
    return (
        f'<div class="expert"><h3>Expert {escape(expert.name)}<span>{facts}</span></h3>{body}</div>'
    )


def _snippet(snippet: Snippet) -> str:
    place = snippet.place
    text = "".join(_piece(piece) for piece in _trimmed(snippet.pieces))
    css = (
        ""
        if snippet.among_all and snippet.among_words
        else (' class="all-only"' if snippet.among_all else ' class="words-only"')
    )
    return (
        f'<li{css}><div class="where"><b>{snippet.coefficient:.3f}</b><span>document '
        f"{place.document:,}, token {place.offset:,}</span></div><pre>{text}</pre></li>"
    )


def _trimmed(pieces: list[Piece]) -> list[Piece]:
    """Removes white space at both ends, unless the snippet is about it."""
    shown = [i for i, piece in enumerate(pieces) if piece.is_peak or piece.text.strip()]
    return pieces[shown[0] : shown[-1] + 1] if shown else pieces


def _piece(piece: Piece) -> str:
    text = visible(piece.text)
    highest = max(piece.coefficients)
    if highest <= 0 and not piece.is_peak:
        return text
    title = ", ".join(f"{a:.3f}" for a in piece.coefficients)
    css = ' class="peak"' if piece.is_peak else ""
    return f'<mark{css} style="--a:{min(1.0, highest):.2f}" title="{title}">{text}</mark>'
