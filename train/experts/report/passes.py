"""What a report reads with a checkpoint: text, images or labelled sequences, on one device."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from polyad.data.config import DataConfig
from polyad.data.errors import DataError
from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.config.run import RunConfig, data_overrides, parse_config
from polyad.train.console import Progress
from polyad.train.errors import ConfigError
from polyad.train.experts.chosen import columns_of
from polyad.train.experts.kept_activation import Kept, kept_activation
from polyad.train.experts.knockout_pass import KNOCKOUT_TOKENS, read_without
from polyad.train.experts.predicted_text import PredictedText
from polyad.train.experts.probing import RoutedLayer
from polyad.train.experts.report.class_pass import ClassPass
from polyad.train.experts.report.content import ExpertReport, TextPass
from polyad.train.experts.report.image_pass import ImageChoice, ImagePass, read_images
from polyad.train.experts.report.reading import Choice, Text, read_text
from polyad.train.experts.report.sequence_pass import read_sequences, samples_of
from polyad.train.tasks.cross_entropy import cross_entropy
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.language import LanguageModelling, language_model
from polyad.train.tasks.registry import task_class
from polyad.train.tasks.sequences import SequenceTask
from polyad.train.tasks.task import OneDevice, Task
from polyad.train.tasks.tokenizers import need_tokenizer, open_data, tokenizer_of


def pass_over_text(
    weights: Checkpoint,
    layers: Sequence[RoutedLayer],
    choice: Choice,
    *,
    data: str | None,
    split: SplitName,
    limit: int,
    kept: dict[str, Kept],
    knockout: bool = False,
) -> TextPass:
    """Reads text.

    Args:
        weights: of a language model.
        layers: whose experts are read.
        choice: what is kept.
        data: prepared data; None: the run's.
        split: of it.
        limit: about how many tokens are read.
        kept: gets what groups of units keep, by layer.
        knockout: whether the experts that are shown are also left out, of at most
            `KNOCKOUT_TOKENS` tokens.

    Raises:
        ConfigError: the data does not fit, or coefficients are not finite.
    """
    config = parse_config(weights.config_yaml, origin=str(weights.folder / "config.yaml"))
    settings, model_config = config.data, language_model(weights)
    assert isinstance(settings, DataConfig)
    if data is None and settings.mixture is not None:
        folders = ", ".join(source.path for source in settings.mixture)
        raise ConfigError(f"data.mixture: read one folder, with --data, of {folders}")
    path = settings.path if data is None else data
    try:
        prepared = open_data(
            path,
            weights.state.tokenizer_fingerprint,
            "checkpoint",
            lambda: tokenizer_of(weights),
        )
    except ConfigError as error:
        raise ConfigError(
            f"{error}; --data names another folder, --tokens 0 reads no text"
        ) from None
    text = Text(
        prepared.split(split),
        model_config.sequence_length,
        config.evaluation.batch_size or config.train.micro_batch_size,
        need_tokenizer(weights, None),
        limit,
    )
    total = prepared.manifest.splits[split].tokens
    expected = min(total, text.count * text.length)
    perplexity: float | None = None
    with _loaded(weights, kept) as model:
        found = read_text(
            model,
            layers,
            text,
            choice,
            name=str(weights.folder),
            progress=Progress(f"read {split}", expected),
        )
        if total <= limit:
            perplexity = _perplexity(model, weights, data, split, total)
    shown, left_out = found.layers, None
    if knockout:
        shown, left_out = _with_knockout(model, weights, layers, shown, data, split, limit)
    return TextPass(
        data=str(path),
        split=split,
        tokens=found.tokens,
        of_tokens=total,
        perplexity=perplexity,
        layers=shown,
        division=found.division,
        left_out=left_out,
    )


def _perplexity(
    model: nn.Module, weights: Checkpoint, data: str | None, split: SplitName, tokens: int
) -> float:
    """The perplexity of a whole split, as `polyad evaluate` computes it."""
    config, task = _held_out(weights, data, split, "text")
    score = task.score(
        OneDevice(model, cross_entropy),
        split,
        batch_size=config.evaluation.batch_size or config.train.micro_batch_size,
        world=comm.initialize(config.parallel.timeout_minutes),
        report=Progress(f"score {split}", tokens),
    )
    return float(score["perplexity"])


def _with_knockout(
    model: nn.Module,
    weights: Checkpoint,
    layers: Sequence[RoutedLayer],
    shown: Mapping[str, list[ExpertReport]],
    data: str | None,
    split: SplitName,
    limit: int,
) -> tuple[dict[str, list[ExpertReport]], int]:
    """The experts that are shown, each with the loss without it, and how many tokens were read."""
    config, task = _held_out(weights, data, split, "text")
    assert isinstance(task, LanguageModelling)
    text = PredictedText(task, split, min(limit, KNOCKOUT_TOKENS))
    by_name = {layer.name: layer for layer in layers}
    chosen = [
        (by_name[name], columns_of(by_name[name], [expert.name for expert in experts]))
        for name, experts in shown.items()
        if experts
    ]
    if not chosen:  # coefficients are 0 throughout
        return dict(shown), 0
    progress = Progress("leave out experts", text.windows * text.length)
    batch_size = config.evaluation.batch_size or config.train.micro_batch_size
    found, _ = read_without(model, chosen, (), text, batch_size, report=progress)
    without = {each.layer.name: each.experts() for each in found}
    return {
        name: [replace(expert, without=without[name][expert.name]) for expert in experts]
        for name, experts in shown.items()
    }, int(found[0].by_class["all"].tokens_C[0])


def pass_over_images(
    weights: Checkpoint,
    layers: Sequence[RoutedLayer],
    choice: ImageChoice,
    *,
    every_layer: Sequence[RoutedLayer],
    data: str | None,
    split: SplitName,
    kept: dict[str, Kept],
) -> ImagePass:
    """Reads images.

    Args:
        weights: of a model of images.
        layers: whose top images are kept.
        choice: what is kept.
        every_layer: whose experts are counted by class.
        data: prepared images; None: the run's.
        split: of them.
        kept: gets what groups of units keep, by layer.

    Raises:
        ConfigError: the data does not fit, or coefficients are not finite.
    """
    config, task = _held_out(weights, data, split, "images")
    assert isinstance(task, ImageClassification)
    count = min(task.units_of(split), choice.limit)
    with _loaded(weights, kept) as model:
        return read_images(
            model,
            layers,
            task,
            split,
            choice,
            every_layer=every_layer,
            batch_size=config.evaluation.batch_size or config.train.micro_batch_size,
            progress=Progress(f"read {split}", count, "img"),
        )


def pass_over_sequences(
    weights: Checkpoint,
    layers: Sequence[RoutedLayer],
    *,
    data: str | None,
    split: SplitName,
    limit: int | None,
    examples: int,
    kept: dict[str, Kept],
) -> ClassPass:
    """Reads labelled sequences.

    Args:
        weights: of a model that scores them.
        layers: whose experts are counted by class.
        data: as `data.path`; None: the run's.
        split: of it.
        limit: about how many tokens are read; None: all.
        examples: sequences with the largest loss that are kept.
        kept: gets what groups of units keep, by layer.

    Raises:
        ConfigError: the data does not fit, or outputs are not finite.
    """
    config, task = _held_out(weights, data, split, "sequences")
    assert isinstance(task, SequenceTask)
    with _loaded(weights, kept) as model:
        return read_sequences(
            model,
            layers,
            task,
            split,
            limit=limit,
            examples=examples,
            batch_size=config.evaluation.batch_size or config.train.micro_batch_size,
            progress=Progress(f"read {split}", samples_of(task, split, limit), task.unit.short),
        )


@contextmanager
def _loaded(weights: Checkpoint, kept: dict[str, Kept]) -> Iterator[nn.Module]:
    """A model that reads; what its groups of units keep is known afterwards."""
    model = load_model(weights.folder, _device())
    with kept_activation(model) as sums:
        yield model
    kept |= {name: found for name, each in sums.items() if (found := each.result()) is not None}


def _held_out(
    weights: Checkpoint, data: str | None, split: SplitName, what: str
) -> tuple[RunConfig, Task[Any]]:
    """The configuration of a checkpoint, and its task with the data that is read."""
    where = str(weights.folder / "config.yaml")
    config = parse_config(weights.config_yaml, (), origin=where)
    if data is not None:
        config = parse_config(weights.config_yaml, data_overrides(config, data), origin=where)
    try:
        task = task_class(config.data.kind).open_held_out(config.for_task(), weights)
        task.check_split(split)
    except (ConfigError, DataError) as error:
        raise ConfigError(
            f"{error}; --data names another folder, --tokens 0 reads no {what}"
        ) from None
    return config, task


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
