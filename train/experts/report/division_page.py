"""The part of a page about how experts divide the work: entropies of gates, and information."""

import math
from html import escape

from polyad.train.experts.information import Measured
from polyad.train.experts.report.by_class_page import level_matrix
from polyad.train.experts.report.class_page import figure_of_table, table
from polyad.train.experts.report.content import Report

DIVISION_TITLE = "How experts divide the work"
NOTE = (
    "H_s: the mean entropy of a token's probabilities over experts, low where the gate is decided. "
    "H_u: the entropy of their mean over all tokens, high where all experts are used. I(E; Y): "
    "what the expert of a token tells about its label; normalized: over the mean entropy of "
    "experts and labels; purity: the share of tokens with the most frequent label of their expert. "
    "Cosine and CKA: how alike the outputs of two experts are on the same tokens, the mean over "
    "pairs. In brackets: 95% intervals, by drawing samples anew 200 times."
)


def division_section(report: Report) -> str:
    """A table of all layers that were read; nothing where none was.

    Args:
        report: what the page says.

    Returns:
        HTML.
    """
    division = report.division
    if division is None:
        return ""
    shown = {} if report.classes is None else report.classes.layers  # by_class_page has those
    titles = {layer.name: layer.title.capitalize() for layer in report.routed}
    entropies, information, pictures = [], [], ""
    for name, levels in division.entropies.items():
        for number, level in enumerate(levels):
            title = titles.get(name, name) + (f", level {number}" if len(levels) > 1 else "")
            highest = f"{level.highest:.2f}"
            alike = division.similarity[name][number]
            entropies.append(
                [
                    *(escape(title), _number(level.of_token), _number(level.of_usage), highest),
                    *(_number(alike.cosine), _number(alike.cka)),
                ]
            )
            for label, found in division.by_label.items():
                each = found[name][number]
                said = [_number(measure) for measure in each.measures.values()]
                said.insert(1, f"{each.by_chance:.4f}")
                said += ["–", "–"] if each.of_highest is None else [
                    _number(each.of_highest), f"{each.highest_by_chance:.4f}",
                ]  # fmt: skip
                information.append([escape(title), label, *said])
                if name not in shown:
                    heading = f"{title}: experts by {label}"
                    pictures += level_matrix(each, heading, by_expert=label == "characters")
    figures = figure_of_table(
        "Entropies of gates, and how alike experts are",
        table(("layer", "H_s, bits", "H_u, bits", "at most", "cosine", "CKA"), entropies),
        wide=True,
    )
    if information:
        heads = ("layer", "label", "I(E; Y), bits", "by chance", "normalized", "purity",
                 "of the highest share", "by chance")  # fmt: skip
        figures += figure_of_table(
            "How much an expert reveals about the token",
            table(heads, information, names=2),
            wide=True,
        )
    return (
        f'<section id="division"><h2>{DIVISION_TITLE}</h2><p class="note">{NOTE}</p>'
        f'<div class="grid">{figures}{pictures}</div></section>'
    )


def _number(measure: Measured) -> str:
    if math.isnan(measure.value):
        return "–"
    interval = "" if measure.low is None else f" [{measure.low:.4f}, {measure.high:.4f}]"
    return f"{measure.value:.4f}{interval}"
