"""The data of a study: prepared if it is not there, and what it decides of models."""

from pathlib import Path

from data.errors import DataError
from data.images.prepare import prepare_images
from data.text.dataset import PreparedData
from data.text.prepare import prepare
from model.bert import BertConfig
from model.gpt2 import GPT2Config
from model.settings import ModelSettings
from train.errors import ConfigError
from train.study.study import Study, Variant
from train.tasks.registry import open_task
from train.tasks.text import with_vocabulary


def prepared(study: Study) -> str:
    """Prepares the study's data if it is not there or not all of it.

    Args:
        study: it has data, or its base has.

    Returns:
        The fingerprint of the data of all runs.

    Raises:
        ConfigError: there is no data, or none to score runs on.
    """
    data, split = study.config.data, study.config.split
    if data is not None and data.source is not None and study.has_images:
        held_out = data.validation_fraction
        prepare_images(data.source, data.path, held_out=held_out, overwrite=False)
    if data is None or study.has_images:
        task = open_task(study.baseline.config.for_task())
        for wanted in {split, *(["validation"] if study.has_grid else [])}:
            task.check_split(wanted)
        return task.fingerprint
    if data.source is not None and data.tokenizer is not None:
        prepare(
            data.source,
            data.tokenizer,
            data.path,
            validation_fraction=data.validation_fraction,
            test_fraction=data.test_fraction,
        )
    try:
        found = PreparedData.open(Path(data.path))
    except DataError as error:
        raise ConfigError(f"{study.file}: data.path: {error}") from None
    if not found.manifest.splits[split].tokens:
        raise ConfigError(
            f"{study.file}: split: {split} has no text in {data.path}; take another, or prepare "
            f"the text with some"
        )
    if study.has_grid and not found.manifest.splits["validation"].tokens:
        raise ConfigError(
            f"{study.file}: grid: needs a validation split to choose by, and {data.path} has none"
        )
    return found.manifest.fingerprint


def model_of(study: Study, variant: Variant) -> ModelSettings:
    """The model of a variant with what the data decides, before anything is prepared if need be.

    Args:
        study: whose data it is.
        variant: of the study.

    Raises:
        ConfigError: the data does not say it, or model and data do not belong together.
    """
    model, data = variant.config.model, study.config.data
    if data is None or not isinstance(model, GPT2Config | BertConfig):
        return open_task(variant.config.for_task()).model
    size = _vocab_size(study)
    try:
        return with_vocabulary(model, size, f"data.path: {data.path}")
    except ValueError as error:
        raise ConfigError(f"{study.file}: variants.{variant.name}: {error}") from None


def _vocab_size(study: Study) -> int:
    data = study.config.data
    assert data is not None
    try:
        return PreparedData.open(Path(data.path)).manifest.tokenizer.vocab_size
    except DataError as error:
        kind, _, size = (data.tokenizer or "").partition(":")
        if kind == "train" and size.isdecimal():
            return int(size)
        raise ConfigError(
            f"{study.file}: data.path: {error}; how large the vocabulary is, and so the model, is "
            f"known then"
        ) from None
