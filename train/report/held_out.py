"""A report's pass over held-out data: text, images or labelled sequences, on one device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyad.data.config import DataConfig
from polyad.data.text.manifest import SplitName
from polyad.parallel.weights import Weights, device_of
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer, columns_of
from polyad.train.measures.knockout import knock_out, knockout_tables
from polyad.train.measures.routes import TracedText
from polyad.train.measures.specialization import Labels, Specialization
from polyad.train.reading import TOKENS, Subject, open_data_for
from polyad.train.report.top_images import MOST_IMAGES, ImagePass, TopImages
from polyad.train.report.top_tokens import ShownExpert, TopText
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
    data, split = opened.config.data, options.split
    if isinstance(data, DataConfig) and data.mixture is not None:
        folders = ", ".join(source.path for source in data.mixture)
        raise ConfigError(f"data.mixture: choose one folder to read with --data, out of {folders}")
    opened.task.check_split(split)
    task = opened.task
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
