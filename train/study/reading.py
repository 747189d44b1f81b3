"""Reads a study's file and checks it as far as possible without data."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyad.train.config.environment import check_compiler
from polyad.train.config.faults import describe
from polyad.train.config.rules import validate
from polyad.train.config.run import config_of, read_tree
from polyad.train.config.text import DOTTED_KEY, flatten, settle
from polyad.train.errors import ConfigError, shown
from polyad.train.study.config import Point, RunKey, StudyConfig, StudyData, as_written, points
from polyad.train.study.study import Study, Variant, folder_of, is_text, place_of, run_folder
from polyad.train.tasks.registry import task_class

MEASURED_KINDS = ("images", "sequences", "text", "masked_text")
"""Kinds of data for which `specialization` can be measured."""
KNOCKOUT_KINDS = ("text", "masked_text")
"""Kinds of data for which `knockout` can be measured."""
SET_BY_THE_STUDY = ("seed", "run", "data")
"""Sections that no variant may set: the seed, the folder and the data of a run. A task may set the
data."""
INIT_FROM: RunKey = "checkpoint.init_from"
TEACHER: RunKey = "distill.teacher"
SAME_IN_EVERY_VARIANT = (
    # Keys that determine the batches, or the scored tokens and their context.
    "train.steps", "train.global_batch_size", "model.sequence_length", "evaluation.stride",
)  # fmt: skip


def load_studies(file: Path, baseline: str | None = None) -> dict[str, Study]:
    """Reads a study and checks every variant as far as possible without data.

    Args:
        file: YAML.
        baseline: the variant with which others are compared; None: the file's.

    Returns:
        A study for each of the file's tasks, by name; one with an empty name if there are no tasks.

    Raises:
        ConfigError: one line names the key, and the variant if it belongs to one.
    """
    tree = read_tree(file)
    try:
        config = StudyConfig.model_validate(settle(tree, StudyConfig))
    except ValidationError as error:
        raise ConfigError(f"{file}: {describe(error, StudyConfig)}") from None
    if baseline is not None:
        if baseline not in config.variants:
            known = ", ".join(config.variants)
            raise ConfigError(
                f"--beside: {shown(baseline)} is not a variant of {file}; variants: {known}"
            )
        config = config.model_copy(update={"baseline": baseline})
    with _named(f"{file}: base"):
        base_tree = read_tree(Path(config.base))
    if not config.tasks:
        return {"": _load(file, config, base_tree, "", ())}
    if config.data is not None:
        raise ConfigError(f"{file}: data: is not allowed together with tasks, which name the data")
    studies = {}
    for name, keys in config.tasks.items():
        where = f"{file}: tasks.{name}"
        overrides = tuple(_overrides(keys, where, allowed=("data",)))
        studies[name] = _load(file, config, base_tree, name, overrides)
    kinds = {name: study.baseline.config.data.kind for name, study in studies.items()}
    first, *others = kinds
    for name in others:
        if kinds[name] != kinds[first]:
            raise ConfigError(
                f"{file}: tasks.{name}: data.kind: {kinds[name]} differs from {first}'s "
                f"{kinds[first]}, so their scores cannot be averaged"
            )
    return studies


def load_study(file: Path) -> Study:
    """Reads a study with at most one task; see `load_studies`."""
    (study,) = load_studies(file).values()
    return study


def _load(
    file: Path, config: StudyConfig, base_tree: dict[str, Any], task: str, of_task: tuple[str, ...]
) -> Study:
    """One task of a study."""
    folder = folder_of(config, task)
    place = place_of(config, str(folder), _kind(base_tree))
    with _named(f"{file}: tasks.{task}" if task else f"{file}: base"):
        kind = config_of(base_tree, [*of_task, *place], origin=config.base).data.kind
    common = _overrides(config.common, f"{file}: common")
    with _named(f"{file}: common"):
        config_of(base_tree, [*common, *of_task, *place], origin=config.base)
    _check_source(config.data, kind, file)
    variants = {}
    for name, own in config.variants.items():
        where = f"{file}: variants.{name}"
        overrides = (*common, *of_task, *_overrides(own, where))
        for point in _points(config, name, file):
            there = where + (f" at {point.name}" if point.name else "")
            _check_from_runs(config, name, own.keys() | point.keys.keys(), file)
            for key in own.keys() & point.keys.keys():
                raise ConfigError(
                    f"{where}: {key}: is not allowed, because a grid sets it and "
                    f"{as_written(own[key])} would not be trained; use grids.{name}: {{{key}: "
                    f"[{as_written(own[key])}]}} instead"
                )
            values = tuple(f"{key}={as_written(value)}" for key, value in point.keys.items())
            variant = _variant(
                (name, point.name), base_tree, (*overrides, *values), (config, folder), there
            )
            variants[variant.name] = variant
    study = Study(file=file, config=config, task_name=task, variants=variants)
    _check_pairs(variants, study.baseline.name, file)
    _check_leak(config, variants, file)
    if config.attack is not None and task_class(kind).attack is None:
        raise ConfigError(f"{file}: attack: is not allowed with data.kind: {kind}")
    if config.specialization and kind not in MEASURED_KINDS:
        raise ConfigError(
            f"{file}: specialization: true is not allowed with data.kind: {kind}; allowed with: "
            f"{', '.join(MEASURED_KINDS)}"
        )
    _check_knockout(study, file)
    return study


def _points(config: StudyConfig, variant: str, file: Path) -> list[Point]:
    """The points of a variant's grid, whose keys are checked."""
    grid = config.grid | config.grids.get(variant, {})
    for where, keys in (("grid", config.grid), (f"grids.{variant}", config.grids.get(variant, {}))):
        _overrides(keys, f"{file}: {where}")
    with _named(f"{file}: grid"):
        return points(grid)


def _check_from_runs(config: StudyConfig, variant: str, own: Collection[str], file: Path) -> None:
    """Checks that a variant has a single value for a key that names another's run."""
    for key in config.from_runs.get(variant, {}):
        if key in own:
            raise ConfigError(
                f"{file}: from_runs.{variant}: {key}: is not allowed, {variant} sets {key} itself"
            )


def _kind(base: Mapping[str, Any]) -> str:
    """The kind of data in a base file, whose `data` may be malformed."""
    data = base.get("data")
    return str(data.get("kind", "text")) if isinstance(data, Mapping) else "text"


def _check_source(data: StudyData | None, kind: str, file: Path) -> None:
    """Checks that a text source has a tokenizer, and other data has none."""
    if data is None:
        return
    if not is_text(kind):
        if data.tokenizer is not None:
            raise ConfigError(f"{file}: data.tokenizer: is not allowed with data.kind: {kind}")
        return
    if (data.source is None) != (data.tokenizer is None):
        there, missing = ("source", "tokenizer") if data.source else ("tokenizer", "source")
        raise ConfigError(f"{file}: data.{missing}: is missing, but needed with data.{there}")


def _variant(
    name: tuple[str, str],
    base: dict[str, Any],
    overrides: tuple[str, ...],
    place: tuple[StudyConfig, Path],
    where: str,
) -> Variant:
    """Makes a variant from its name and its point's, in a study and its task's folder."""
    study, folder = place
    group, point = name
    from_runs = study.from_runs.get(group, {})
    with _named(where):
        longest = str(run_folder(folder, "/".join(filter(None, name)), max(study.seeds)))
        values = [*overrides, *place_of(study, longest, _kind(base))]
        config = config_of(base, values, origin=study.base)
        # Adapters need weights, and distill.blocks a teacher; each seed's run is filled in later.
        needed = {INIT_FROM: config.checkpoint.init_from is None}
        needed |= {TEACHER: config.distill.blocks is not None and config.distill.teacher is None}
        named = [f"{k}={json.dumps(run)}" for k, run in from_runs.items() if needed[k]]
        if named:
            config = config_of(base, [*values, *named], origin=study.base)
        validate(config, 1)
        check_compiler(config)
        config.model.filled()
    return Variant(
        group=group, point=point, overrides=overrides, config=config, from_runs=from_runs
    )


@contextmanager
def _named(where: str) -> Iterator[None]:
    """A context that prefixes errors with the place in the study."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _overrides(tree: Mapping[str, Any], where: str, allowed: Sequence[str] = ()) -> list[str]:
    """Dotted keys as `key=value`; JSON is YAML."""
    for key in tree:
        if not DOTTED_KEY.fullmatch(key):
            raise ConfigError(f"{where}: {shown(key)} is not a dotted key such as train.steps")
        section = key.partition(".")[0]
        if section in SET_BY_THE_STUDY and section not in allowed:
            raise ConfigError(
                f"{where}: {key}: is not allowed, the study sets {section} itself: see seeds, "
                f"folder, data and tasks"
            )
    return [f"{key}={as_written(value)}" for key, value in tree.items()]


def _check_pairs(variants: Mapping[str, Variant], baseline: str, file: Path) -> None:
    """Checks that runs with one seed read the same batches and are scored on the same tokens."""
    wanted = flatten(variants[baseline].config.model_dump(mode="json"))
    for name, variant in variants.items():
        found = flatten(variant.config.model_dump(mode="json"))
        for key in SAME_IN_EVERY_VARIANT:
            if found.get(key) != wanted.get(key):
                raise ConfigError(
                    f"{file}: variants.{name}: {key}: {found.get(key)} differs from {baseline}'s "
                    f"{wanted.get(key)}: runs with the same seed would not see the same batches; "
                    "set it under common"
                )


def _check_knockout(study: Study, file: Path) -> None:
    """Checks that there are experts to remove."""
    knockout, kind = study.config.knockout, study.baseline.config.data.kind
    if knockout is None:
        return
    if kind not in KNOCKOUT_KINDS:
        raise ConfigError(
            f"{file}: knockout: is not allowed with data.kind: {kind}; "
            f"{', '.join(KNOCKOUT_KINDS)} have it, and images specialization: true"
        )
    measured = {name: each for name, each in study.variants.items() if each.has_experts}
    if not measured:
        raise ConfigError(f"{file}: knockout: no variant has experts")
    for name, variant in measured.items():
        blocks = [
            block
            for block, each in enumerate(variant.config.model.block_feed_forwards())
            if each.kind != "dense"
        ]
        for layer in knockout.layers:
            if layer not in blocks:
                raise ConfigError(
                    f"{file}: knockout.layers: {layer} is not allowed: blocks with experts in "
                    f"{name} are {', '.join(map(str, blocks)) or 'none'}"
                )


def _check_leak(study: StudyConfig, variants: Mapping[str, Variant], file: Path) -> None:
    """Checks that there are checkpoints to score without the leak."""
    if study.leak is None:
        return
    leaking = {name: variant.config for name, variant in variants.items() if variant.leaks}
    if not leaking:
        raise ConfigError(
            f"{file}: leak: no variant has model.feed_forward.causal_graph: false, so nothing leaks"
        )
    for name, config in leaking.items():
        every, end = config.checkpoint.every, config.train.steps
        last, always = config.checkpoint.keep_last, config.checkpoint.keep_every
        for step in study.leak.steps:
            if step > end or (step != end and (every == 0 or step % every)):
                raise ConfigError(
                    f"{file}: leak.steps: {step} has no checkpoint in {name}, which writes one "
                    + (f"every {every} steps and " if every else "")
                    + f"at step {end}"
                )
            if config.evaluation.patience is not None:
                raise ConfigError(
                    f"{file}: leak.steps: {step}: {name} may end before that step: "
                    f"evaluation.patience"
                )
            newer = -(-(end - step) // every) if every else 0
            if config.checkpoint.keep_best and step < end:
                newer = end  # each better validation writes one, too
            if last is not None and newer >= last and not (always and step % always == 0):
                raise ConfigError(
                    f"{file}: leak.steps: {step}: {name} keeps that checkpoint only until there "
                    f"are {last} newer ones: checkpoint.keep_last"
                )
