"""A report's pass over held-out data, text, images or labelled sequences, on one device; and the
rows of its page: one for each expert, with measured numbers.

With a knockout, a row has the change of the loss on the class of tokens that is harmed most without
the expert; otherwise the class of which it gets more than its share. No class is named unless one
stands out beyond noise.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch

from polyad.data.text.manifest import SplitName
from polyad.parallel.weights import Weights, device_of
from polyad.train.experts.by_class import LevelByClass
from polyad.train.experts.knockout import SIDES, Change
from polyad.train.experts.probing import RoutedLayer, columns_of
from polyad.train.experts.token_classes import BINS, CHARACTERS
from polyad.train.measures.knockout import knock_out, knockout_tables
from polyad.train.measures.routes import TracedText
from polyad.train.measures.specialization import Labels, Specialization
from polyad.train.reading import TOKENS, Subject, open_data_for
from polyad.train.report.top_tokens import MOST_IMAGES, ImagePass, ShownExpert, TopImages, TopText
from polyad.train.results import Tables
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.samples import ImageSamples, Samples, TextSamples, samples_of
from polyad.train.tasks.task import Task
from polyad.train.tasks.text import TextTask

TEXT_TOKENS = 250_000
"""Default for the approximate number of tokens of text to read."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which held-out data a report reads, and of which experts."""

    layers: Sequence[str] = ()
    """Blocks whose experts are listed, by number, or `all`; empty: first, middle and last."""
    experts: Sequence[str] = ()
    """Names of experts, in each of these layers; empty: some are picked."""
    top: int = 8
    """Number of contexts or images per expert."""
    data: str | None = None
    """Prepared data, or labelled sequences; None: the run's."""
    split: SplitName = "validation"
    tokens: int | None = None
    """Approximate number of tokens to read, spread evenly over the split (at most 20,000 images); 0
    reads nothing; None: `TEXT_TOKENS` of text, all images and sequences."""
    knockout: bool = False
    """Whether to also measure text without each expert."""


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Results on held-out data."""

    data: str
    split: str
    unit: str
    """What is counted: token, image or sequence."""
    units: int
    """How many were read."""
    of_units: int
    """How many the whole split has."""
    labels: Mapping[str, list[Labels]] | None
    """Labels of the levels of each layer, by layer name; None for rows without labels."""
    specialization: Tables | None
    """The same as tables."""
    knockout: Tables | None
    """Tables of `polyad experts atlas`, of the shown experts."""
    shown: Mapping[str, list[ShownExpert]] = field(default_factory=dict)
    """Experts with what they weight most, by layer name; empty for sequences."""
    images: ImagePass | None = None


def read_held_out(weights: Weights, layers: Sequence[RoutedLayer], options: Options) -> ReportData:
    """Reads held-out data.

    Args:
        weights: weights of a run, or a folder of weights.
        layers: the layers of `options.layers`; at least one.
        options: what to read.

    Raises:
        ConfigError: the data does not fit, or weights of experts or losses are not finite.
    """
    opened = open_data_for(weights, options.data, ("train.precision=fp32",), "trained")
    task, split = opened.task, options.split
    task.check_split(split)
    with opened.loaded(f"reading {split}", split, needs_whole=None) as (model, _):
        subject = Subject(model, layers, _samples(task, options), opened.batch_size)
        about = {"data": task.name, "split": split, "of_units": task.units_of(split)}
        return _read(subject, options, unit=task.unit.name, task=task, **about)


def read_trace(text: TracedText, layers: Sequence[RoutedLayer], options: Options) -> ReportData:
    """Reads a trace, without its model.

    Args:
        text: the trace.
        layers: the layers of `options.layers`.
        options: which experts and how many contexts; the rest is of held-out data.
    """
    about = {"data": str(text.stream.prefix), "split": text.about.get("split", "whole")}
    return _read(text.subject(layers), options, unit="token", of_units=text.amount, **about)


@torch.inference_mode()
def _read(
    subject: Subject, options: Options, *, task: Task[Any] | None = None, **about: Any
) -> ReportData:
    """Reads the samples once; `about` has further fields of the result, and a trace no task."""
    model, layers, samples, _ = subject
    device = str(torch.device("cpu") if task is None else device_of(model))
    specialization = None
    if isinstance(samples, TextSamples) or samples.classes() is not None:
        specialization = Specialization(leave_out=False, counts_only=task is None)
        specialization.begin(subject)
    top: TopText | TopImages | None = None
    if isinstance(samples, TextSamples):
        top = TopText(layers, samples, options.top, device)
    elif isinstance(samples, ImageSamples):
        top = TopImages(layers, samples, options.top, device)
    readers = [each for each in (specialization, top) if each is not None]
    for forward_pass in subject.read(label=f"read {options.split}"):
        for each in readers:
            each.add(forward_pass)
    shown = top.result(options.experts) if top else {}
    return ReportData(
        units=top.tokens if isinstance(top, TopText) else samples.amount,
        labels=None if specialization is None else specialization.labels(),
        specialization=None if specialization is None else specialization.result(),
        knockout=_without_experts(subject, task, shown, options) if options.knockout else None,
        shown=shown,
        images=top.pictures(model, shown) if isinstance(top, TopImages) else None,
        **about,
    )


def _samples(task: Task[Any], options: Options) -> Samples:
    most = options.tokens
    if isinstance(task, TextTask):
        most = most or TEXT_TOKENS
    elif isinstance(task, ImageClassification):
        most = min(most or MOST_IMAGES, MOST_IMAGES)
    return samples_of(task, options.split, most)


def _without_experts(
    subject: Subject,
    task: Task[Any] | None,
    shown: Mapping[str, list[ShownExpert]],
    options: Options,
) -> Tables | None:
    """Measures the loss without each shown expert; None if no expert is used."""
    layers = [layer for layer in subject.layers if shown[layer.name]]
    if not layers:
        return None
    assert isinstance(task, TextTask)
    most = min(options.tokens or TEXT_TOKENS, TOKENS)
    samples = TextSamples(task, options.split, most, hidden=True)
    columns = [columns_of(layer, [e.name for e in shown[layer.name]]) for layer in layers]
    sets = [[(column,) for column in each] for each in columns]
    subject = subject._replace(layers=layers, samples=samples)
    return knockout_tables(knock_out(subject, sets), samples)


EXPERT = ["module", "level", "expert"]
"""The columns that name an expert."""


class Effect(NamedTuple):
    """An expert's measured effect on a class, and on all other tokens."""

    by: str
    """The labeling: characters, position or frequency of tokens, or class; empty: all tokens."""
    name: str
    """The class; empty: none stands out."""
    value: Change
    """Change of the loss on the class without the expert, in nats per token. Without a knockout the
    lift: the expert's share of the class divided by its share of all. With their intervals."""
    elsewhere: float | None
    """The same over all other tokens; None if no class stands out."""

    @property
    def title(self) -> str:
        """The title of the class."""
        if not self.name:
            return "no class stands out"
        side, _, by = self.by.rpartition(" ")
        if by in ("position", "class"):
            return f"{'positions' if by == 'position' else by} {self.name}"
        if by == "frequency":
            is_between = self.name.startswith("eighth")
            name = f"{self.name} by frequency" if is_between else f"the {self.name}"
            return f"{side} tokens of {name}".strip()
        return f"{side} {self.name}".strip()


class ExpertRow(NamedTuple):
    """One expert."""

    layer: RoutedLayer
    name: str
    """The expert's name; see `RoutedLayer.expert_name`."""
    share: float
    """Its share of the assignments, or of the coefficients, of its level."""
    effect: Effect | None
    """None if nothing was measured, or no class stands out without a knockout."""
    top: Sequence[Any] = ()
    """Its contexts or images."""

    @property
    def anchor(self) -> str:
        """Its anchor."""
        return f"{self.layer.name}.{self.name}"

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        effect = self.effect
        return {
            "anchor": self.anchor,
            "layer": self.layer.name,
            "expert": self.name,
            "by": effect and effect.by,
            "class": effect and effect.name,
            **(effect.value._asdict() if effect else dict.fromkeys(Change._fields)),
            "elsewhere": effect and effect.elsewhere,
            "share": self.share,
            "top": [each._asdict() for each in self.top],
        }


def expert_rows(layers: Sequence[RoutedLayer], read: ReportData) -> list[ExpertRow]:
    """Returns the rows of all experts, largest effect first; those without one by their shares.

    Args:
        layers: the layers that were read.
        read: results on held-out data. With a knockout only the experts that it removed have rows.
    """
    effects = None if read.knockout is None else harms(read.knockout)
    rows = [row for layer in layers for row in _of_layer(layer, read, effects)]
    return sorted(
        rows,
        key=lambda row: (row.effect.value.value if row.effect else -math.inf, row.share),
        reverse=True,
    )


def _of_layer(
    layer: RoutedLayer, read: ReportData, effects: Mapping[tuple[Any, ...], Effect] | None
) -> Iterator[ExpertRow]:
    shown = {each.name: each for each in read.shown.get(layer.name, ())}
    if read.labels is None:  # rows without labels
        for name, expert in shown.items():
            yield ExpertRow(layer, name, expert.share, None, expert.top)
        return
    for number, labels in enumerate(read.labels[layer.name]):
        names = [layer.expert_name(n) for n in range(layer.num_experts)[layer.columns[number]]]
        shares = next(iter(labels.values())).share_S.tolist()
        lifts = _lifts(labels)
        for column, (name, share, lift) in enumerate(zip(names, shares, lifts, strict=True)):
            top = shown[name].top if name in shown else ()
            if effects is None:
                yield ExpertRow(layer, name, share, lift, top)
            elif (place := (layer.name, number, column)) in effects:
                yield ExpertRow(layer, name, share, effects[place], top)


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


def harms(knockout: Tables) -> dict[tuple[Any, ...], Effect]:
    """Finds for each expert the class of tokens that is harmed most without it, if any stands out.

    Args:
        knockout: the tables of `polyad experts atlas`.

    Returns:
        By module, level and expert: the class with the largest change among those above the change
        of all other tokens; without one the change over all tokens.
    """
    tokens, frames = knockout.facts["tokens_scored"], knockout.frames
    sides = {by.partition(" ")[0] for by in frames["classes"]["by"]} & set(SIDES)
    classes = len(sides) * (len(CHARACTERS) + BINS)
    effects = {
        tuple(row[name] for name in EXPERT): Effect("", "", _change(row), None)
        for row in frames["experts"].to_dict("records")
    }
    of_all = {place: effect.value.value for place, effect in effects.items()}
    for row in frames["harmed"].sort_values("change").to_dict("records"):  # the largest is last
        place, change = tuple(row[name] for name in EXPERT), _change(row)
        if (others := tokens - row["tokens"]) > 0:
            of_others = tokens * of_all[place] - row["tokens"] * change.value
            if is_beyond(change, max(0.0, of_others / others), classes):
                effects[place] = Effect(row["by"], row["class"], change, of_others / others)
    return effects


def _change(row: Mapping[str, Any]) -> Change:
    """The change in a row of a table."""
    return Change(row["change"], row["change_low"], row["change_high"])


def _lifts(labels: Mapping[str, LevelByClass]) -> list[Effect | None]:
    """For each expert the class with the highest lift, if that exceeds 1 beyond noise."""
    classes = sum(len(level.groups) for level in labels.values())
    effects: dict[int, list[Effect]] = {}
    for by, level in labels.items():
        of_class_Y, whole = level.counts_SY.sum(0), level.counts_SY.sum()
        for row, (class_, lift) in enumerate(zip(*level.highest_lifts(), strict=True)):
            change, counts_Y = Change(*lift), level.counts_SY[row]
            of_row = effects.setdefault(row, [])
            if is_beyond(change, 1.0, classes):
                with np.errstate(divide="ignore", invalid="ignore"):
                    rest = (counts_Y.sum() - counts_Y[class_]) / (whole - of_class_Y[class_])
                elsewhere = float(rest / level.share_S[row])
                of_row.append(Effect(by, level.groups[class_], change, elsewhere))
    return [
        max(each, key=lambda effect: effect.value.value, default=None) for each in effects.values()
    ]
