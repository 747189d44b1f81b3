"""A checked study: its variants and its runs. `train/study/reading.py` reads it.

A run's configuration is the base file with the keys of `common`, its task, its variant and its
grid point, a seed, a folder and the study's data. Runs with one seed are paired, so variants may
differ in everything but the batches. A run may start from another variant's run with the same seed,
or learn from it: at the best point of that variant's grid.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyad.data.config import DataConfig
from polyad.data.images.config import ImageDataConfig
from polyad.parallel.checkpoint.load import best_checkpoint
from polyad.train.config.run import RunConfig
from polyad.train.config.text import apply_override, below, flatten, settle
from polyad.train.errors import ConfigError
from polyad.train.study.config import RunKey, StudyConfig
from polyad.train.tasks.registry import TASKS, task_class
from polyad.train.tasks.task import Task

WITHOUT_EFFECT = (
    # Keys or sections that do not affect results: they may differ when a study is resumed.
    "seed", "run", "log", "checkpoint.every", "evaluation.every",
    "evaluation.max_windows", "evaluation.batch_size", "parallel.timeout_minutes",
    # The data itself is compared instead.
    "data.path", "data.mixture", "data.num_workers", "data.verify", "data.tokenizer",
    "data.padding", "data.max_damaged",
)  # fmt: skip
OF_THE_BEST = ("evaluation.every", "evaluation.max_windows")
"""Keys among them that determine which checkpoint is best, or when a run ends."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant of the run, checked as far as possible without the data."""

    group: str
    """Its name in the study's file."""
    point: str
    """The name of its grid point; empty if it has none."""
    overrides: tuple[str, ...]
    """Overrides of the base as `key=value`, including those of `common`."""
    config: RunConfig
    from_runs: Mapping[RunKey, str] = field(default_factory=dict)
    """Its part of `StudyConfig.from_runs`; `config` has placeholders for these keys."""

    @property
    def name(self) -> str:
        """Its unique name, which is also the path of its runs."""
        return f"{self.group}/{self.point}" if self.point else self.group

    @property
    def scores_best(self) -> bool:
        """Whether its runs keep the best checkpoint, which then is scored."""
        return self.config.checkpoint.keep_best

    @property
    def leaks(self) -> bool:
        """Whether its tokens choose experts by later tokens."""
        return False

    @property
    def has_experts(self) -> bool:
        """Whether any part of it is a mixture of experts."""
        model = self.config.model
        parts = [*model.feed_forwards().values(), getattr(model, "head", None)]
        kinds = [model.kind, *(getattr(part, "kind", None) for part in parts)]
        experts = ("mumoe", "smoe", "emoe", "mxd", "transcoder", "mixture")
        return any(kind in experts for kind in kinds)

    def defining_keys(self) -> dict[str, Any]:
        """The keys that affect its results, with their values, as JSON values."""
        return _defining_keys(self.config) | dict(self.from_runs)

    def read_keys(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Recorded `defining_keys`, with keys of later versions at their defaults.

        Returns:
            The keys as this version's `defining_keys` returns them. If this version does not know
            or allow one of them, they are returned unchanged, with this variant's values for new
            keys.
        """
        flat = flatten(self.config.model_dump(mode="json"))
        tree: dict[str, Any] = {}
        # A run's folder and text are not recorded, and do not matter. Earlier versions did not
        # record the data.
        has_data = any(below(key, ("data",)) for key in recorded)
        left_out = WITHOUT_EFFECT if has_data else (*WITHOUT_EFFECT, "data")
        free = {key: value for key, value in flat.items() if below(key, left_out)}
        try:
            for key, value in (free | dict(recorded)).items():
                apply_override(tree, f"{key}={json.dumps(value)}")
            return _defining_keys(RunConfig.model_validate(settle(tree, RunConfig)))
        except (ConfigError, ValidationError):
            return self.defining_keys() | dict(recorded)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study, checked without its data."""

    file: Path
    config: StudyConfig
    task_name: str
    """The name of the task in the file; empty if there are no tasks."""
    variants: dict[str, Variant]
    """By `Variant.name`, with a separate entry for each grid point."""

    @property
    def folder(self) -> Path:
        """The study's folder, or its task's folder inside it."""
        return folder_of(self.config, self.task_name)

    @property
    def groups(self) -> dict[str, list[Variant]]:
        """The grid points of each variant in the file."""
        found: dict[str, list[Variant]] = {}
        for variant in self.variants.values():
            found.setdefault(variant.group, []).append(variant)
        return found

    @property
    def baseline(self) -> Variant:
        """The variant with which others are compared, at the first point of its grid."""
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
        """Yields the runs in order: seed by seed, so that comparisons are possible early, and
        each after those from which it starts or learns.

        Args:
            chosen: the best point of each variant's grid, if known. With the seeds after
                `swept_seeds` only these are trained, and other runs start only from theirs.
        """
        groups, order = self.groups, self.config.training_order()
        for seed in self.config.seeds:
            for group in order:
                variants = groups[group]
                if seed not in self.swept_seeds and len(variants) > 1:
                    variants = [chosen[group]] if group in chosen else []
                for variant in variants:
                    others = variant.from_runs
                    if all(other in chosen for other in others.values()):
                        sources = {key: chosen[other] for key, other in others.items()}
                        yield Run(variant=variant, seed=seed, study=self, sources=sources)

    @property
    def num_runs(self) -> int:
        """The total number of runs."""
        return sum(map(self.num_runs_of, self.groups))

    def num_runs_of(self, group: str) -> int:
        """The number of runs of a variant in the file: all points, or only the best one."""
        swept = len(self.swept_seeds)
        return len(self.groups[group]) * swept + len(self.config.seeds) - swept


@dataclass(frozen=True, kw_only=True)
class Run:
    """One variant with one seed."""

    variant: Variant
    seed: int
    study: Study
    sources: Mapping[RunKey, Variant] = field(default_factory=dict)
    """Variants by key: their runs with the same seed are the values of these keys."""

    def __str__(self) -> str:
        """The name of the run in messages."""
        task = f"{self.study.task_name}, " if self.study.task_name else ""
        point = f" at {self.variant.point}" if self.variant.point else ""
        return f"{task}{self.variant.group}{point}, seed {self.seed}"

    @property
    def is_swept(self) -> bool:
        """Whether it is one of several grid points that are tried with its seed."""
        points = self.study.groups[self.variant.group]
        return len(points) > 1 and self.seed in self.study.swept_seeds

    @property
    def folder(self) -> Path:
        """The run's folder, `run.folder`."""
        return run_folder(self.study.folder, self.variant.name, self.seed)

    @property
    def result_file(self) -> Path:
        """Its result file, which exists if the run is finished."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def source_names(self) -> dict[str, str]:
        """The names of its sources by key, as stored in its result."""
        return {key: variant.name for key, variant in self.sources.items()}

    @property
    def overrides(self) -> list[str]:
        """All overrides of the base as `key=value`.

        Raises:
            CheckpointError: a run from which it starts has no best checkpoint.
        """
        return [*self.own_overrides, *self._from_sources()]

    @property
    def own_overrides(self) -> list[str]:
        """The same without the runs from which it starts or learns."""
        return [
            *self.variant.overrides,
            f"seed={self.seed}",
            *place_of(self.study.config, str(self.folder), self.variant.config.data.kind),
        ]

    @property
    def checked_overrides(self) -> list[str]:
        """`own_overrides` with which a run can be checked or tried before its sources exist."""
        config = self.variant.config
        named: dict[str, str | None] = {
            "checkpoint.init_from": config.checkpoint.init_from,
            "distill.teacher": config.distill.teacher,
        }
        return self.own_overrides + [
            f"{key}={json.dumps(run)}"
            for key, run in named.items()
            if key in self.variant.from_runs and run is not None
        ]

    def _from_sources(self) -> Iterator[str]:
        """Overrides with the checkpoints by which the source runs are scored."""
        for key, variant in self.sources.items():
            folder = run_folder(self.study.folder, variant.name, self.seed)
            path = best_checkpoint(folder) if variant.scores_best else folder
            yield f"{key}={json.dumps(str(path))}"


def folder_of(study: StudyConfig, task: str) -> Path:
    """The folder of a study's task; the study's own for a task without a name."""
    return Path(study.folder, task)


def run_folder(study: Path, variant: str, seed: int) -> Path:
    """The folder of a run inside that of its study or task."""
    return study / "runs" / variant / f"seed-{seed}"


def place_of(study: StudyConfig, folder: str, kind: str) -> list[str]:
    """Overrides for a run's folder and the study's data of some kind."""
    place = [f"run.folder={json.dumps(folder)}"]
    if study.data is not None:
        place.append(f"data.path={json.dumps(study.data.path)}")
        place += ["data.mixture=null"] if is_text(kind) else []
    return place


def _defining_keys(config: RunConfig) -> dict[str, Any]:
    flat = flatten(json.loads(json.dumps(config.model_dump(mode="json"))))
    judged = config.checkpoint.keep_best or config.evaluation.patience is not None
    counted: tuple[str, ...] = OF_THE_BEST if judged else ()
    return {k: v for k, v in flat.items() if k in counted or not below(k, WITHOUT_EFFECT)}


def is_text(kind: str) -> bool:
    """Whether this kind of data is text prepared by `polyad prepare`."""
    return kind in TASKS and issubclass(TASKS[kind].data_settings, DataConfig)


def changed_key(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first key in which two runs differ, with both values; None if they are equal."""
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            return f"{key}: {before.get(key)!r} there, {after.get(key)!r} here"
    return None
