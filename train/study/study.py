"""A study, read and checked: its variants and its runs. `polyad study`.

A run of the study is the base file with `common`, the keys of a task, the variant's own, those of a
point of the grid, a seed, a folder and the study's data. Runs of one seed are a pair, so variants
may differ in everything but the batches.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data.config import DataConfig
from data.images.config import ImageDataConfig
from model.smoe.config import SparseMoEConfig
from train.config.environment import check_compiler
from train.config.faults import describe
from train.config.rules import validate
from train.config.run import RunConfig, config_of, read_tree
from train.config.text import DOTTED_KEY, apply_override, flatten, settle
from train.errors import ConfigError, shown
from train.study.config import StudyConfig, StudyData
from train.study.grid import Point, as_written, points
from train.tasks.registry import TASKS, task_class
from train.tasks.task import Task

SET_BY_THE_STUDY = ("seed", "run", "data")
"""Sections that no variant may set: the seed, the folder and the data of a run. A task may set the
data."""
SAME_IN_EVERY_VARIANT = (
    # Keys that decide the batches, or the scored tokens and their context.
    "train.steps", "train.global_batch_size", "model.sequence_length", "evaluation.stride",
)  # fmt: skip
WITHOUT_EFFECT = (
    # Keys, or whole sections, that change no result: they may differ when a study goes on.
    "seed", "run", "data", "log", "checkpoint.every", "evaluation.every",
    "evaluation.max_windows", "evaluation.batch_size", "parallel.timeout_minutes",
)  # fmt: skip
OF_THE_BEST = ("evaluation.every", "evaluation.max_windows")
"""Those of them that decide which checkpoint is the best, or when a run ends."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant of the run, checked as far as possible without the data."""

    group: str
    """Its name in the study's file."""
    point: str
    """The name of its point of the grid; empty if it has none."""
    overrides: tuple[str, ...]
    """`key=value` over the base, those of `common` among them."""
    config: RunConfig

    @property
    def name(self) -> str:
        """The name that it has alone, and the path of its runs."""
        return f"{self.group}/{self.point}" if self.point else self.group

    @property
    def scores_best(self) -> bool:
        """Whether its runs keep the best checkpoint, which then is the one that is scored."""
        return self.config.checkpoint.keep_best

    @property
    def leaks(self) -> bool:
        """Whether its tokens choose experts by later tokens."""
        feed_forward = self.config.model.known_feed_forward()
        return isinstance(feed_forward, SparseMoEConfig) and not feed_forward.causal_graph

    @property
    def has_experts(self) -> bool:
        """Whether any part of it is a mixture of experts."""
        model = self.config.model
        parts = [*model.feed_forwards().values(), getattr(model, "head", None)]
        return any(getattr(part, "kind", None) in ("mumoe", "smoe", "emoe") for part in parts)

    def defining_keys(self) -> dict[str, Any]:
        """The keys that its results depend on, with their values, as JSON has them."""
        return _defining_keys(self.config)

    def read_keys(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Recorded `defining_keys`, with keys of later versions at their defaults.

        Args:
            recorded: of a variant, by any version.

        Returns:
            As `defining_keys` would give them today; if this version does not know one of them, or
            does not allow its value, as they are, with this variant's own for those that have come.
        """
        flat = flatten(self.config.model_dump(mode="json"))
        tree: dict[str, Any] = {}
        # The folder and text of a run are not recorded, and change nothing.
        free = {key: value for key, value in flat.items() if _below(key, WITHOUT_EFFECT)}
        try:
            for key, value in (free | dict(recorded)).items():
                apply_override(tree, f"{key}={json.dumps(value)}")
            return _defining_keys(RunConfig.model_validate(settle(tree, RunConfig)))
        except (ConfigError, ValidationError):
            return self.defining_keys() | dict(recorded)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study that was checked without its data."""

    file: Path
    config: StudyConfig
    task_name: str
    """Which of the file's tasks; empty if it has none."""
    variants: dict[str, Variant]
    """By `Variant.name`: each point of the grid by itself."""

    @property
    def folder(self) -> Path:
        """The study's, or that of its task in there."""
        return _folder(self.config, self.task_name)

    @property
    def groups(self) -> dict[str, list[Variant]]:
        """The points of the grid of each variant that the file names."""
        found: dict[str, list[Variant]] = {}
        for variant in self.variants.values():
            found.setdefault(variant.group, []).append(variant)
        return found

    @property
    def baseline(self) -> Variant:
        """The variant that the others are compared with, at the first point of its grid."""
        return self.groups[self.config.baseline][0]

    @property
    def task(self) -> type[Task[Any]]:
        """The task of all runs."""
        return task_class(self.baseline.config.data.kind)

    @property
    def has_grid(self) -> bool:
        """Whether any variant has several points."""
        return any(len(points) > 1 for points in self.groups.values())

    @property
    def swept_seeds(self) -> list[int]:
        """The seeds with which the whole grid is trained."""
        return self.config.seeds[: self.config.grid_seeds]

    @property
    def has_images(self) -> bool:
        """Whether the data of all runs are images."""
        return isinstance(self.baseline.config.data, ImageDataConfig)

    def runs(self, chosen: Mapping[str, Variant]) -> Iterator["Run"]:
        """The runs in their order: seed by seed, so that there is soon something to compare.

        Args:
            chosen: the best point of each variant's grid, of those for which it is known. With the
                seeds after `swept_seeds` only these are trained.
        """
        for seed in self.config.seeds:
            for group, variants in self.groups.items():
                if seed not in self.swept_seeds and len(variants) > 1:
                    variants = [chosen[group]] if group in chosen else []
                for variant in variants:
                    yield Run(variant=variant, seed=seed, study=self)

    @property
    def num_runs(self) -> int:
        """How many runs there are in all."""
        swept = len(self.swept_seeds)
        rest = len(self.config.seeds) - swept
        return sum(len(variants) * swept + rest for variants in self.groups.values())


@dataclass(frozen=True, kw_only=True)
class Run:
    """One variant with one seed."""

    variant: Variant
    seed: int
    study: Study

    def __str__(self) -> str:
        """The name of the run in messages."""
        task = f"{self.study.task_name}, " if self.study.task_name else ""
        point = f" at {self.variant.point}" if self.variant.point else ""
        return f"{task}{self.variant.group}{point}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """The run's own, as `run.folder`."""
        return _run_folder(self.study.folder, self.variant.name, self.seed)

    @property
    def result_file(self) -> Path:
        """The file of its result, which exists if the run is finished."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def overrides(self) -> list[str]:
        """`key=value` over the base: everything that makes the run."""
        return [
            *self.variant.overrides,
            f"seed={self.seed}",
            *_place(self.study.config, str(self.folder), self.variant.config.data.kind),
        ]


def _folder(study: StudyConfig, task: str) -> Path:
    return Path(study.folder, task)


def _run_folder(study: Path, variant: str, seed: int) -> Path:
    return study / "runs" / variant / f"seed-{seed}"


def _place(study: StudyConfig, folder: str, kind: str) -> list[str]:
    """`key=value` for the folder of a run and the data of all, of some kind."""
    place = [f"run.folder={json.dumps(folder)}"]
    if study.data is not None:
        place.append(f"data.path={json.dumps(study.data.path)}")
        place += ["data.mixture=null"] if _is_text(kind) else []
    return place


def load_studies(file: Path) -> dict[str, Study]:
    """Reads a study and checks every variant as far as it can be without data.

    Args:
        file: YAML.

    Returns:
        A study for each of the file's tasks, by its name; one without a name where it has none.

    Raises:
        ConfigError: one line names the key, and the variant where it is one's.
    """
    tree = read_tree(file)
    try:
        config = StudyConfig.model_validate(settle(tree, StudyConfig))
    except ValidationError as error:
        raise ConfigError(f"{file}: {describe(error, StudyConfig)}") from None
    with _named(f"{file}: base"):
        base_tree = read_tree(Path(config.base))
    if not config.tasks:
        return {"": _load(file, config, base_tree, "", ())}
    if config.data is not None:
        raise ConfigError(f"{file}: data: is not allowed beside tasks, which name the data")
    studies = {}
    for name, keys in config.tasks.items():
        where = f"{file}: tasks.{name}"
        overrides = tuple(_overrides(keys, where, allowed=("data",)))
        studies[name] = _load(file, config, base_tree, name, overrides)
    return studies


def load_study(file: Path) -> Study:
    """Reads a study without tasks, or with one; see `load_studies`."""
    (study,) = load_studies(file).values()
    return study


def _load(
    file: Path, config: StudyConfig, base_tree: dict[str, Any], task: str, of_task: tuple[str, ...]
) -> Study:
    """One task of a study."""
    folder = _folder(config, task)
    place = _place(config, str(folder), _kind(base_tree))
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
    if config.specialization and kind != "images":
        raise ConfigError(
            f"{file}: specialization: true is not allowed with data.kind: {kind}; images has it"
        )
    return study


def _points(config: StudyConfig, variant: str, file: Path) -> list[Point]:
    """The points of a variant's grid, each of which sets what no variant sets."""
    grid = config.grid | config.grids.get(variant, {})
    for where, keys in (("grid", config.grid), (f"grids.{variant}", config.grids.get(variant, {}))):
        _overrides(keys, f"{file}: {where}")
    with _named(f"{file}: grid"):
        return points(grid)


def _kind(base: Mapping[str, Any]) -> str:
    """The kind of data of a base file, which may say something else than data."""
    data = base.get("data")
    return str(data.get("kind", "text")) if isinstance(data, Mapping) else "text"


def _is_text(kind: str) -> bool:
    """Whether data of a kind is text that `polyad prepare` makes."""
    return kind in TASKS and issubclass(TASKS[kind].data_settings, DataConfig)


def _check_source(data: StudyData | None, kind: str, file: Path) -> None:
    """Checks that text has a tokenizer beside its source, and other data none."""
    if data is None:
        return
    if not _is_text(kind):
        if data.tokenizer is not None:
            raise ConfigError(f"{file}: data.tokenizer: is not allowed with data.kind: {kind}")
        return
    if (data.source is None) != (data.tokenizer is None):
        there, missing = ("source", "tokenizer") if data.source else ("tokenizer", "source")
        raise ConfigError(f"{file}: data.{missing}: is missing beside data.{there}")


def _variant(
    name: tuple[str, str],
    base: dict[str, Any],
    overrides: tuple[str, ...],
    place: tuple[StudyConfig, Path],
    where: str,
) -> Variant:
    """A variant, by its name and that of its point, in a study and the folder of its task."""
    study, folder = place
    with _named(where):
        longest = str(_run_folder(folder, "/".join(filter(None, name)), max(study.seeds)))
        config = config_of(
            base, [*overrides, *_place(study, longest, _kind(base))], origin=study.base
        )
        validate(config, 1)
        check_compiler(config)
        config.model.filled()
    group, point = name
    return Variant(group=group, point=point, overrides=overrides, config=config)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """A context that puts the place in the study before an error's message."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _overrides(tree: Mapping[str, Any], where: str, allowed: Sequence[str] = ()) -> list[str]:
    """Dotted keys as `key=value`; JSON is YAML."""
    for key in tree:
        if not DOTTED_KEY.fullmatch(key):
            raise ConfigError(f"{where}: {shown(key)} is not a key, as train.steps is one")
        section = key.partition(".")[0]
        if section in SET_BY_THE_STUDY and section not in allowed:
            raise ConfigError(
                f"{where}: {key}: is not allowed, the study sets {section} itself: see seeds, "
                f"folder, data and tasks"
            )
    return [f"{key}={as_written(value)}" for key, value in tree.items()]


def _check_pairs(variants: Mapping[str, Variant], baseline: str, file: Path) -> None:
    """Checks that runs of one seed see the same batches, and are scored on the same tokens."""
    wanted = flatten(variants[baseline].config.model_dump(mode="json"))
    for name, variant in variants.items():
        found = flatten(variant.config.model_dump(mode="json"))
        for key in SAME_IN_EVERY_VARIANT:
            if found.get(key) != wanted.get(key):
                raise ConfigError(
                    f"{file}: variants.{name}: {key}: {found.get(key)} is not {baseline}'s "
                    f"{wanted.get(key)}: runs of one seed would not see the same batches; set it "
                    f"under common"
                )


def _defining_keys(config: RunConfig) -> dict[str, Any]:
    flat = flatten(json.loads(json.dumps(config.model_dump(mode="json"))))
    judged = config.checkpoint.keep_best or config.evaluation.patience is not None
    counted = OF_THE_BEST if judged else ()
    return {k: v for k, v in flat.items() if k in counted or not _below(k, WITHOUT_EFFECT)}


def _check_leak(study: StudyConfig, variants: Mapping[str, Variant], file: Path) -> None:
    """Checks that there are checkpoints to be scored without what leaks."""
    if study.leak is None:
        return
    leaking = {name: variant.config for name, variant in variants.items() if variant.leaks}
    if not leaking:
        raise ConfigError(
            f"{file}: leak: no variant has model.feed_forward.causal_graph: false, so nothing leaks"
        )
    for name, config in leaking.items():
        every, end = config.checkpoint.every, config.train.steps
        for step in study.leak.steps:
            if step > end or (step != end and (every == 0 or step % every)):
                raise ConfigError(
                    f"{file}: leak.steps: {step} has no checkpoint in {name}, which writes one "
                    + (f"every {every} steps and " if every else "")
                    + f"at step {end}"
                )


def changed_key(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first key that two runs differ in, with both values; None if they do not."""
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            return f"{key}: {before.get(key)!r} there, {after.get(key)!r} here"
    return None


def _below(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
