"""The data of a study: prepared if it is not there, and what it decides of models."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from polyad.data.errors import DataError, user_path
from polyad.data.files import locked
from polyad.data.images.prepare import prepare_images
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.launch.output import say
from polyad.model.bert import BertConfig
from polyad.model.gpt2 import GPT2Config
from polyad.model.settings import ModelSettings
from polyad.train.errors import ConfigError
from polyad.train.study.config import StudyData
from polyad.train.study.study import Study, Variant
from polyad.train.tasks.registry import open_task
from polyad.train.tasks.text import with_vocabulary


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
    if data is not None and data.source is not None:
        with _alone(Path(data.path)):
            _prepare(study, data, data.source)
    if data is None or study.has_images:
        task = open_task(study.baseline.config.for_task())
        for wanted in {split, *(["validation"] if study.has_grid else [])}:
            task.check_split(wanted)
        return task.fingerprint
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


def _prepare(study: Study, data: StudyData, source: str) -> None:
    """Prepares data, or looks whether what is there was prepared from the same request."""
    if study.has_images:
        held_out = data.validation_fraction
        prepare_images(source, data.path, held_out=held_out, overwrite=False)
    elif data.tokenizer is not None:
        # The file may leave a share out, as of a source that has such a split.
        given = data.model_fields_set
        validation = data.validation_fraction if "validation_fraction" in given else None
        test = data.test_fraction if "test_fraction" in given else None
        prepare(
            source,
            data.tokenizer,
            data.path,
            validation_fraction=validation,
            test_fraction=test,
        )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits until no other study prepares the same data, and makes others wait.

    Two at once would write the same files, or put a folder in the place of one that is being read.
    Where no lock can be had, as on a read-only disk, there is none.
    """
    path = user_path(path).resolve()
    lock = path.parent / f".{path.name}.lock"
    with ExitStack() as held:
        with suppress(OSError):  # preparing says what is wrong with the place, if anything is
            path.parent.mkdir(parents=True, exist_ok=True)
            if not held.enter_context(locked(lock, wait=False)):
                say(f"{path}: another study prepares it; this one waits for that")
                held.enter_context(locked(lock, wait=True))
        yield


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
