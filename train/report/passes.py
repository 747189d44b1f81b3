"""A report's pass over held-out data: text, images or labelled sequences, on one device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from polyad.data.config import DataConfig
from polyad.data.errors import DataError
from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.streamed import Streamed, device_of
from polyad.parallel.weights import Weights
from polyad.train.config.run import RunConfig, data_overrides, parse_config
from polyad.train.console import Progress
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer, columns_of
from polyad.train.measures.knockout import TOKENS, KnockOuts
from polyad.train.measures.measure import Subject
from polyad.train.measures.registry import MEASURES
from polyad.train.reading import check_data_named, config_of, read
from polyad.train.report.classes import Predictions
from polyad.train.report.content import HeldOut
from polyad.train.report.top_images import TopImages
from polyad.train.report.top_text import Snippet, TextPass, TopText
from polyad.train.report.top_tokens import ShownExpert
from polyad.train.streaming import opened_model, predicting
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.language import TextScores
from polyad.train.tasks.registry import task_class
from polyad.train.tasks.samples import ImageSamples, Samples, SequenceSamples, TextSamples
from polyad.train.tasks.sequences import SequenceTask
from polyad.train.tasks.task import Task
from polyad.train.tasks.text import TextTask


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options of a report."""

    layers: Sequence[RoutedLayer]
    """The layers whose experts are shown."""
    every_layer: Sequence[RoutedLayer]
    """The layers whose experts are counted by class."""
    experts: Sequence[str]
    """Names of experts, in every layer; empty: some are picked."""
    top: int
    """Number of tokens or images per expert, and of samples with the largest loss."""
    data: str | None
    """A value for `data.path`; None: the run's."""
    split: SplitName
    limit: int | None
    """Approximate number of tokens or images to read; None: all."""
    knockout: bool
    """Whether to also measure text without each shown expert."""
    stream: Path | None = None
    """See `polyad.train.reading.open_evaluated`."""


def read_held_out(weights: Weights, what: str, asked: Asked) -> HeldOut:
    """Reads held-out data.

    Args:
        weights: weights of a run, or a folder of weights.
        what: kind of data: `text`, `images` or `sequences`.
        asked: options of the report.

    Raises:
        ConfigError: the data does not fit, or coefficients or outputs are not finite.
    """
    config, task = _open(weights, asked, what)
    batch_size = config.evaluation.batch_size or config.train.micro_batch_size
    with opened_model(
        weights, comm.initialize(), "fp32", folder=asked.stream, needs_whole=None
    ) as model:
        return _read(weights, task, asked, model, batch_size)


def _read(
    weights: Weights, task: Task[Any], asked: Asked, model: nn.Module, batch_size: int
) -> HeldOut:
    """Reads held-out data with a model; see `read_held_out`."""
    samples, device = _samples(task, asked), str(device_of(model))
    layers = asked.layers if isinstance(samples, TextSamples) else asked.every_layer
    subject = Subject(model, layers, samples, batch_size)
    measures = {
        name: measure
        for name, kind in MEASURES.items()
        if (measure := kind.in_report(subject)) is not None
    }
    if isinstance(model, Streamed):
        for measure in measures.values():
            if measure.needs_whole is not None:
                raise ConfigError(
                    f"{measure.name}: is not allowed block by block: {measure.needs_whole}"
                )
    top_text = top_images = predictions = None
    if isinstance(samples, TextSamples):
        top_text = TopText(layers, samples, asked.top, device)
    if isinstance(samples, ImageSamples):
        top_images = TopImages(asked.layers, samples, asked.top, device)
    if isinstance(samples, ImageSamples | SequenceSamples) and samples.classes() is not None:
        predictions = Predictions(samples)
    readers = [each for each in (top_text, top_images, predictions) if each is not None]
    read(
        model,
        layers,
        samples,
        [*readers, *measures.values()],
        batch_size=batch_size,
        told=f"read {asked.split}",
    )
    text = images = None
    if top_text is not None:
        shown = top_text.result(model, asked.experts, batch_size, str(weights.folder))
    classes = None if predictions is None else predictions.result(asked.top)
    results = {name: measure.result() for name, measure in measures.items()}
    if top_text is not None:
        text = TextPass(
            data=task.name,
            split=asked.split,
            tokens=top_text.tokens,
            of_tokens=task.units_of(asked.split),
            perplexity=_perplexity(subject, task, asked),
            layers=shown,
        )
    if top_images is not None:
        largest = [] if classes is None else [each.number for each in classes.examples]
        images = top_images.result(model, asked.experts, largest)
    if asked.knockout and text is not None:
        text = _with_knockout(subject, task, text, asked)
    return HeldOut(
        text=text,
        images=images,
        classes=classes,
        measures=results,
    )


def _samples(task: Task[Any], asked: Asked) -> Samples:
    if isinstance(task, TextTask):
        return TextSamples(task, asked.split, asked.limit, with_first=False)
    if isinstance(task, ImageClassification):
        return ImageSamples(task, asked.split, asked.limit)
    assert isinstance(task, SequenceTask)
    return SequenceSamples(task, asked.split, asked.limit)


def _open(weights: Weights, asked: Asked, what: str) -> tuple[RunConfig, Task[Any]]:
    """Opens the configuration of weights, and its task with the data to read."""
    config = config_of(weights)
    if asked.data is not None:
        where = str(weights.folder / "config.yaml")
        overrides = data_overrides(config, asked.data)
        config = parse_config(config.to_yaml(), overrides, origin=where)
    else:
        check_data_named(weights, config)
    if isinstance(config.data, DataConfig) and config.data.mixture is not None:
        folders = ", ".join(source.path for source in config.data.mixture)
        raise ConfigError(f"data.mixture: choose one folder to read with --data, out of {folders}")
    try:
        task = task_class(config.data.kind).open_held_out(config.for_task(), weights)
        task.check_split(asked.split)
    except (ConfigError, DataError) as error:
        raise ConfigError(
            f"{error}; name another folder with --data, or use --tokens 0 to read no {what}"
        ) from None
    return config, task


def _perplexity(subject: Subject, task: Task[Any], asked: Asked) -> float | None:
    """The same perplexity as in `polyad evaluate`; None unless the whole split is read."""
    total = task.units_of(asked.split)
    if asked.limit is None or total > asked.limit:
        return None
    score = predicting(
        subject.model,
        lambda predictor, told: task.score(
            predictor,
            asked.split,
            batch_size=subject.batch_size,
            world=comm.initialize(),
            report=told,
        ),
        f"score {asked.split}",
        Progress(f"score {asked.split}", total),
    )
    assert isinstance(score, TextScores)
    return score.perplexity


def _with_knockout(subject: Subject, task: Task[Any], text: TextPass, asked: Asked) -> TextPass:
    """Adds the loss without each shown expert."""
    assert isinstance(task, TextTask)
    assert asked.limit is not None
    shown = [layer for layer in asked.layers if text.layers[layer.name]]
    if not shown:  # coefficients are 0 throughout
        return replace(text, left_out=0)
    samples = TextSamples(task, asked.split, min(asked.limit, TOKENS), hidden=True)
    columns = [columns_of(layer, [e.name for e in text.layers[layer.name]]) for layer in shown]
    measure = KnockOuts(subject._replace(layers=shown, samples=samples), columns)
    measure.read()
    found = measure.result()
    without = {each.layer.name: each.experts() for each in found.layers}
    layers: dict[str, list[ShownExpert[Snippet]]] = {
        name: [replace(expert, without=without[name][expert.name]) for expert in experts]
        for name, experts in text.layers.items()
    }
    return replace(text, layers=layers, left_out=found.tokens)
