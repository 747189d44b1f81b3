"""A study's folder: its identity, its finished runs, and its data.

study.json              definition of every variant, so that results are never mixed up
results.json            the comparison, updated after every run
runs/VARIANT/seed-N/    run folders; beside each finished one its result, seed-N.json
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError, user_path
from polyad.data.files import locked, write_whole
from polyad.data.images.prepare import prepare_images
from polyad.data.json_reader import read_json
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.launch.output import say
from polyad.launch.study.result import RunResult, form_of
from polyad.model.bert import BertConfig
from polyad.model.decoder import DecoderSettings
from polyad.model.settings import ModelSettings
from polyad.train.errors import ConfigError
from polyad.train.guard.run_folder import check_place
from polyad.train.results import json_value
from polyad.train.study.config import StudyData
from polyad.train.study.study import Run, Study, Variant, changed_key
from polyad.train.tasks.registry import open_task
from polyad.train.tasks.text import with_end_of_text, with_vocabulary

RECORD, RESULTS, LOCK = "study.json", "results.json", ".lock"


def check_folder(study: Study) -> None:
    """Checks that the folder is this study's, or new.

    Raises:
        ConfigError: it contains something else, or another study; names the first differing key.
    """
    folder = study.folder
    check_place(folder, f"{study.file}: folder")
    if study.task_name and (folder.parent / RECORD).exists():
        raise ConfigError(
            f"{study.file}: folder: {folder.parent} holds a study without tasks; choose another "
            "folder"
        )
    if not (folder / RECORD).exists():
        others = _others(folder, study.config.data) if folder.exists() else []
        if others:
            raise ConfigError(
                f"{study.file}: folder: {folder} holds {others[0]}, but no study; choose another "
                "folder"
            )
        return
    before = _record_of_runs(folder)
    if not before["variants"]:
        return
    now = record_of(study, None)
    shared = [name for name in now["variants"] if name in before["variants"]]
    if not shared:
        raise ConfigError(
            f"{study.file}: folder: {folder} holds another study, of "
            f"{', '.join(before['variants'])}; choose another folder"
        )
    changes = [("", {"split": before["split"]}, {"split": now["split"]})]
    for name in shared:
        old = study.variants[name].read_keys(before["variants"][name])
        changes.append((f"variants.{name}: ", old, now["variants"][name]))
    for where, old, new in changes:
        if changed := changed_key(old, new):
            raise ConfigError(
                f"{study.file}: {where}{changed}: {folder} holds runs with the earlier value; "
                "change the key back, choose another folder, or give the variant another name"
            )


def _record_of_runs(folder: Path) -> dict[str, Any]:
    """study.json without variants that were not started, which may still change."""
    record = read_record(folder)
    begun = {n: keys for n, keys in record["variants"].items() if (folder / "runs" / n).exists()}
    return record | {"variants": begun}


def _others(folder: Path, text: StudyData | None) -> list[str]:
    """Contents of a folder other than prepared text and dot files such as our lock."""
    kept = set()
    if text is not None:
        data = Path(text.path).absolute()
        kept = {data, *data.parents}
    return sorted(
        entry.name
        for entry in folder.absolute().iterdir()
        if not entry.name.startswith(".") and entry not in kept
    )


def check_data(study: Study, fingerprint: str) -> None:
    """Checks that the data is that of existing runs.

    Raises:
        ConfigError: it is not.
    """
    if (study.folder / RECORD).exists():
        before = _record_of_runs(study.folder)
        if before["variants"] and before["data"] != fingerprint:
            raise ConfigError(
                f"{study.file}: {_data_of(study)} than the runs in {study.folder} were trained on; "
                "choose another folder"
            )


def _data_of(study: Study) -> str:
    data = study.config.data
    return "base: its data is other" if data is None else f"data.path: {data.path} holds other text"


def record_of(study: Study, fingerprint: str | None) -> dict[str, Any]:
    """Returns the content of study.json for some data; None before it is prepared."""
    return {
        "split": study.config.split,
        "data": fingerprint,
        "variants": {name: v.defining_keys() for name, v in study.variants.items()},
    }


def read_record(folder: Path) -> dict[str, Any]:
    """Reads study.json.

    Raises:
        ConfigError: it is damaged.
    """
    found = _read(folder / RECORD, ("split", "data", "variants"))
    variants = found["variants"]
    if not isinstance(variants, dict) or not all(isinstance(v, dict) for v in variants.values()):
        raise ConfigError(
            f"{folder / RECORD}: variants is not a section of keys, so this file was not written "
            "by a study"
        )
    return found


def write_record(study: Study, fingerprint: str) -> None:
    """Writes study.json; variants removed from the study's file are kept in it, like their runs."""
    now = record_of(study, fingerprint)
    if (study.folder / RECORD).exists():
        now["variants"] = _record_of_runs(study.folder)["variants"] | now["variants"]
    write_json(study.folder / RECORD, now)


def read_result(run: Run) -> RunResult | None:
    """Returns the result of a finished run; None for other runs.

    Raises:
        ConfigError: it is damaged.
    """
    if not run.result_file.exists():
        return None
    task = run.study.task
    units = f"{task.unit.name}s"
    scores = [score.name for score in task.scores]
    others = ("variant", "seed", "step", "training_loss", "routing", "seconds")
    found = _read(run.result_file, (*scores, f"{units}_scored", f"{units}_per_second", *others))
    with form_of(run.result_file):
        return RunResult.from_json(found, task.unit.name, scores)


def check_sources(run: Run, result: RunResult) -> None:
    """Checks that a finished run started from the run from which it would start today.

    The best point of a grid may change when more seeds are added.

    Raises:
        ConfigError: it did not.
    """
    for key, name in run.source_names.items():
        before = result.from_runs.get(key)
        if before != name:
            raise ConfigError(
                f"{run.study.file}: from_runs.{run.variant.group}: {key}: the best point is "
                f"{name}, and {run.folder} is from {before}: set grid_seeds to the seeds that "
                f"chose that, or remove {run.result_file} and {run.folder}"
            )


def _read(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    tree = read_json(path, error=ConfigError)
    missing = [key for key in keys if not isinstance(tree, dict) or key not in tree]
    if missing:
        raise ConfigError(f"{path}: has no {missing[0]}, so it was not written by a study")
    return dict(tree)


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """Writes a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(json_value(tree), indent=1, allow_nan=False) + "\n")


@contextmanager
def held(study: Study) -> Iterator[None]:
    """Creates and locks the study's folder; the kernel releases the lock when this process ends.

    Without locks in the file system nothing is locked here; each run locks its own folder.

    Raises:
        ConfigError: another start of the study is still active.
    """
    study.folder.mkdir(parents=True, exist_ok=True)
    with locked(study.folder / LOCK, wait=False) as ours:
        if not ours:
            raise ConfigError(
                f"{study.file}: folder: {study.folder} is in use by another start of this study"
            )
        yield


def prepared(study: Study) -> str:
    """Prepares the study's data if it is missing or incomplete.

    Args:
        study: a study with data, or whose base has data.

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
            f"{study.file}: split: {split} has no text in {data.path}; choose another split, or "
            "prepare the text with one"
        )
    if study.has_grid and not found.manifest.splits["validation"].tokens:
        raise ConfigError(
            f"{study.file}: grid: needs a validation split to choose by, and {data.path} has none"
        )
    return found.manifest.fingerprint


def _prepare(study: Study, data: StudyData, source: str) -> None:
    """Prepares data, or checks that existing data was prepared from the same request."""
    if study.has_images:
        held_out = data.validation_fraction
        prepare_images(source, data.path, held_out=held_out, overwrite=False)
    elif data.tokenizer is not None:
        # The file may omit a fraction, for a source that has such a split.
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
    """A lock against other studies that prepare the same data.

    Two at once would write the same files, or replace a folder that is being read. Where locking is
    impossible, as on a read-only disk, there is no lock.
    """
    path = user_path(path).resolve()
    lock = path.parent / f".{path.name}.lock"
    with ExitStack() as held:
        with suppress(OSError):  # preparing reports errors about this place
            path.parent.mkdir(parents=True, exist_ok=True)
            if not held.enter_context(locked(lock, wait=False)):
                say(f"{path}: waiting for another study that is preparing it")
                held.enter_context(locked(lock, wait=True))
        yield


def model_of(study: Study, variant: Variant) -> ModelSettings:
    """Returns a variant's model, completed from the data, which need not be prepared.

    Raises:
        ConfigError: the data does not determine it, or model and data do not match.
    """
    model, data = variant.config.model, study.config.data
    if data is None or not isinstance(model, DecoderSettings | BertConfig):
        return open_task(variant.config.for_task()).model
    size, end = _vocabulary(study)
    try:
        known = with_vocabulary(model, size, f"data.path: {data.path}")
        if isinstance(known, BertConfig):
            return known
        return with_end_of_text(known, end, f"data.path: {data.path}")
    except ValueError as error:
        raise ConfigError(f"{study.file}: variants.{variant.name}: {error}") from None


def _vocabulary(study: Study) -> tuple[int, int]:
    """The vocabulary size, and the token that ends documents."""
    data = study.config.data
    assert data is not None
    try:
        tokenizer = PreparedData.open(Path(data.path)).manifest.tokenizer
        return tokenizer.vocab_size, tokenizer.end_of_text_id
    except DataError as error:
        kind, _, size = (data.tokenizer or "").partition(":")
        if kind == "train" and size.isdecimal():
            return int(size), 0  # the first token of a tokenizer that we train
        raise ConfigError(
            f"{study.file}: data.path: {error}; the size of the vocabulary, and so of the model, "
            "depends on it"
        ) from None
