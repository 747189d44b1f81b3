"""The first section of a page: one line per expert, with measured numbers.

With a knockout, a line has the change of the loss on the class of tokens that is harmed most
without the expert, and elsewhere; otherwise the class of which it gets more than its share. No
class is named unless one stands out beyond noise.

Shapes: S experts of a level, Y classes, G groups of samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from polyad.train.experts.by_class import LevelByClass
from polyad.train.experts.class_changes import Change
from polyad.train.experts.knockout import ExpertWithout, Harmed, class_title
from polyad.train.experts.probing import RoutedLayer
from polyad.train.experts.token_classes import BINS, CHARACTERS
from polyad.train.measures.specialization import Specialization
from polyad.train.page.template import END, signs
from polyad.train.report.content import HeldOut, Report
from polyad.train.report.top_images import TopImage
from polyad.train.report.top_text import Snippet
from polyad.train.report.top_tokens import ShownExpert

MOST_WORDS = 4
"""Number of top tokens in a line."""
BLANK = "␣"
"""Symbol for a space in tokens that are only spaces."""


class Most(NamedTuple):
    """The class with an expert's highest lift."""

    by: str
    """The labeling: characters, position or frequency of tokens, or class."""
    name: str
    times: Change
    """Lift: its share of the class divided by its share of all, with the interval."""

    @property
    def title(self) -> str:
        """The title of the class."""
        named = {"position": f"positions {self.name}", "class": f"class {self.name}"}
        return named.get(self.by, class_title(self.name))

    @property
    def shown(self) -> str:
        """The formatted lift."""
        return f"{self.times.value:.2f} [{self.times.low:.2f}, {self.times.high:.2f}]"


class Harm(NamedTuple):
    """Change of the loss without an expert on the class harmed most, and elsewhere."""

    harmed: Harmed
    elsewhere: float
    """Mean change of the loss over all other tokens."""

    @property
    def title(self) -> str:
        """The title of the tokens."""
        side, _, by = self.harmed.by.partition(" ")
        if by == "frequency":
            the = "" if self.harmed.title.endswith("by frequency") else "the "
            return f"{side} tokens of {the}{self.harmed.title}"
        return f"{side} {self.harmed.title}"


class ExpertLine(NamedTuple):
    """One expert in a line."""

    layer: RoutedLayer
    name: str
    """The expert's name; see `RoutedLayer.expert_name`."""
    share: float
    """Its share among the experts of its level."""
    most: Most | None
    """None if no class stands out, or there are no classes."""
    without: ExpertWithout | None
    """None without a knockout of this expert."""
    harm: Harm | None
    """None without a knockout of this expert, or if no class stands out."""
    words: Sequence[str]
    """Its distinct top tokens; for images the classes of the top ones."""
    highest: float | None
    """Its highest coefficient; None if its top tokens are not shown."""

    @property
    def anchor(self) -> str:
        """Its anchor."""
        return self.layer.anchor(self.name)

    @property
    def title(self) -> str:
        """The title of the expert."""
        return f"{self.layer.title}, expert {self.name}"

    @property
    def change(self) -> float | None:
        """The change of the loss without it, over all tokens."""
        return None if self.without is None else self.without.change.value

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        most = self.most and {
            "by": self.most.by,
            "class": self.most.name,
            "times": self.most.times._asdict(),
        }
        return {
            "anchor": self.anchor,
            "layer": self.layer.name,
            "expert": self.name,
            "share": self.share,
            "gets_most_of": most,
            "change": self.without and self.without.change._asdict(),
            "most_harmed": self.harm and self.harm.harmed,
            "change_elsewhere": self.harm and self.harm.elsewhere,
            "words": list(self.words),
        }


def expert_lines(report: Report) -> list[ExpertLine]:
    """Returns the lines of all experts, those that matter most first.

    Args:
        report: the report.

    Returns:
        Lines sorted by the absolute change of the loss without the expert, if measured; then, and
        without knockouts, by share.
    """
    lines = [line for layer in report.routed for line in _of_layer(report.read, layer)]
    return sorted(
        lines, key=lambda line: (line.change is None, -abs(line.change or 0), -line.share)
    )


def _of_layer(read: HeldOut, layer: RoutedLayer) -> Iterator[ExpertLine]:
    shown = {expert.name: expert for expert in _shown(read, layer)}
    left_out = (read.text and read.text.left_out) or 0
    levels: list[Mapping[str, LevelByClass]] = []
    if Specialization.name in read.measures:
        levels = [level.labels for level in read.division.layers.get(layer.name, ())]
    if not all(levels) or not levels:  # rows without labels: facts about the shown experts
        sizes = dict(zip(_names(layer), np.repeat(layer.levels, layer.levels), strict=True))
        for name, expert in shown.items():
            yield _line(layer, name, expert.load / sizes[name], None, expert, left_out)
        return
    for labels in levels:
        every = next(iter(labels.values()))
        classes = sum(len(level.groups) for level in labels.values())
        most = {by: _most(by, level, classes) for by, level in labels.items()}
        for row, name in enumerate(every.experts):
            found = [one for each in most.values() if (one := each[row]) is not None]
            best = max(found, key=lambda one: one.times.value, default=None)
            yield _line(layer, name, float(every.share_S[row]), best, shown.get(name), left_out)


def _names(layer: RoutedLayer) -> list[str]:
    return [layer.expert_name(column) for column in range(layer.num_experts)]


def _shown(
    read: HeldOut, layer: RoutedLayer
) -> Sequence[ShownExpert[Snippet]] | Sequence[ShownExpert[TopImage]]:
    """The experts with known top tokens or images."""
    if read.text is not None:
        return read.text.layers.get(layer.name, ())
    return () if read.images is None else read.images.layers.get(layer.name, ())


def _line(
    layer: RoutedLayer,
    name: str,
    share: float,
    most: Most | None,
    expert: ShownExpert[Snippet] | ShownExpert[TopImage] | None,
    left_out: int,
) -> ExpertLine:
    without = None if expert is None else expert.without
    return ExpertLine(
        layer=layer,
        name=name,
        share=share,
        most=most,
        without=without,
        harm=without and most_harmed(without, left_out),
        words=[] if expert is None else _words(expert.top),
        highest=_coefficient(expert.top[0]) if expert is not None and expert.top else None,
    )


def is_beyond(change: Change, other: float, classes: int) -> bool:
    """Whether the highest of several changes exceeds a number beyond noise.

    The 95% interval of a single change is widened for multiple tests (Bonferroni, one-sided 2.5%),
    assuming normal errors.

    Args:
        change: the highest change.
        other: the number.
        classes: the number of changes of which it is the highest.
    """
    normal = NormalDist()
    wider = normal.inv_cdf(1 - 0.025 / classes) / normal.inv_cdf(0.975)
    return change.value - wider * (change.value - change.low) > other


def most_harmed(without: ExpertWithout, tokens: int) -> Harm | None:
    """Finds the class of tokens that is harmed most without an expert, if any stands out.

    Args:
        without: the changes without the expert.
        tokens: number of tokens read, over all classes.

    Returns:
        The class with the largest change among those above the change of all other tokens; None if
        there is none.
    """
    classes = len(without.harmed) * (len(CHARACTERS) + BINS)
    found = []
    for harmed in (one for each in without.harmed.values() for one in each):
        if (others := tokens - harmed.tokens) > 0:
            of_others = tokens * without.change.value - harmed.tokens * harmed.change.value
            found.append(Harm(harmed, of_others / others))
    return max(
        (x for x in found if is_beyond(x.harmed.change, max(0.0, x.elsewhere), classes)),
        key=lambda one: one.harmed.change.value,
        default=None,
    )


def _most(by: str, level: LevelByClass, classes: int) -> list[Most | None]:
    """For each expert the class with the highest lift, if that exceeds 1 beyond noise."""
    found: list[Most | None] = []
    for class_, times in zip(*level.highest_lifts(), strict=True):
        change = Change(*times)
        found.append(
            Most(by, level.groups[class_], change) if is_beyond(change, 1.0, classes) else None
        )
    return found


def _coefficient(top: Snippet | TopImage) -> float:
    return top.top.coefficient if isinstance(top, Snippet) else top.coefficient


def _words(tops: Sequence[Snippet] | Sequence[TopImage]) -> list[str]:
    """The distinct top tokens or images of an expert, words before punctuation."""
    said = [(isinstance(one, Snippet) and not one.top.among_words, _said(one)) for one in tops]
    return list(dict.fromkeys(word for _, word in sorted(said, key=lambda one: one[0]) if word))


def _said(top: Snippet | TopImage) -> str:
    if isinstance(top, TopImage):
        return top.label
    text = "".join(piece.text for piece in top.pieces if piece.is_peak)
    return signs(text.strip() or text.replace(" ", BLANK)).replace(f"{END}\n", END)
