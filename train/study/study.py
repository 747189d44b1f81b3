"""A study that was read and checked: its variants and its runs. `train/study/reading.py` reads it.

A run of the study is the base file with `common`, the keys of a task, the variant's own, those of a
point of the grid, a seed, a folder and the study's data. Runs of one seed are a pair, so variants
may differ in everything but the batches. A run may begin with that of another variant with the same
seed, or learn from it: at the point of the grid that is the best one of that variant.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyad.data.config import DataConfig
from polyad.data.images.config import ImageDataConfig
from polyad.model.smoe.config import SparseMoEConfig
from polyad.parallel.checkpoint.finding import best_checkpoint
from polyad.train.config.run import RunConfig
from polyad.train.config.text import apply_override, below, flatten, settle
from polyad.train.errors import ConfigError
from polyad.train.study.config import RunKey, StudyConfig
from polyad.train.tasks.registry import TASKS, task_class
from polyad.train.tasks.task import Task

WITHOUT_EFFECT = (
    # Keys, or whole sections, that change no result: they may differ when a study goes on.
    "seed", "run", "log", "checkpoint.every", "evaluation.every",
    "evaluation.max_windows", "evaluation.batch_size", "parallel.timeout_minutes",
    # Whether the data is the same is asked of the data itself.
    "data.path", "data.mixture", "data.num_workers", "data.verify", "data.tokenizer",
    "data.padding", "data.max_damaged",
)  # fmt: skip
OF_THE_BEST = ("evaluation.every", "evaluation.max_windows")
"""Keys among them that decide which checkpoint is the best, or when a run ends."""
OF_REWINDS = ("checkpoint.every",)
"""Keys among them that decide where a run goes back to."""


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
    from_runs: Mapping[RunKey, str] = field(default_factory=dict)
    """Its part of `StudyConfig.from_runs`; `config` has other values for these keys."""

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
        sections = self.config.model.feed_forwards().values()
        return any(isinstance(e, SparseMoEConfig) and not e.causal_graph for e in sections)

    @property
    def has_experts(self) -> bool:
        """Whether any part of it is a mixture of experts."""
        model = self.config.model
        parts = [*model.feed_forwards().values(), getattr(model, "head", None)]
        kinds = [model.kind, *(getattr(part, "kind", None) for part in parts)]
        experts = ("mumoe", "smoe", "emoe", "mxd", "transcoder", "mixture")
        return any(kind in experts for kind in kinds)

    def defining_keys(self) -> dict[str, Any]:
        """The keys that its results depend on, with their values, as JSON has them."""
        return _defining_keys(self.config) | dict(self.from_runs)

    def read_keys(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Recorded `defining_keys`, with keys of later versions at their defaults.

        Returns:
            As `defining_keys` would give them today; if this version does not know one of them, or
            does not allow its value, as they are, with this variant's own for those that have come.
        """
        flat = flatten(self.config.model_dump(mode="json"))
        tree: dict[str, Any] = {}
        # The folder and text of a run are not recorded, and change nothing. Earlier versions
        # recorded nothing of the data.
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
        return folder_of(self.config, self.task_name)

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
        """The runs in their order: seed by seed, so that there is soon something to compare, and
        each after those that it begins with or learns from.

        Args:
            chosen: the best point of each variant's grid, of those for which it is known. With the
                seeds after `swept_seeds` only these are trained, and only from their runs others.
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
        """How many runs there are in all."""
        return sum(map(self.num_runs_of, self.groups))

    def num_runs_of(self, group: str) -> int:
        """How many runs a variant that the file names has: all points, or the best one alone."""
        swept = len(self.swept_seeds)
        return len(self.groups[group]) * swept + len(self.config.seeds) - swept


@dataclass(frozen=True, kw_only=True)
class Run:
    """One variant with one seed."""

    variant: Variant
    seed: int
    study: Study
    sources: Mapping[RunKey, Variant] = field(default_factory=dict)
    """The variants whose runs with the same seed are the values of keys."""

    def __str__(self) -> str:
        """The name of the run in messages."""
        task = f"{self.study.task_name}, " if self.study.task_name else ""
        point = f" at {self.variant.point}" if self.variant.point else ""
        return f"{task}{self.variant.group}{point}, seed {self.seed}"

    @property
    def is_swept(self) -> bool:
        """Whether it is of one of several points of a grid that are tried with its seed."""
        points = self.study.groups[self.variant.group]
        return len(points) > 1 and self.seed in self.study.swept_seeds

    @property
    def folder(self) -> Path:
        """The run's own, as `run.folder`."""
        return run_folder(self.study.folder, self.variant.name, self.seed)

    @property
    def result_file(self) -> Path:
        """The file of its result, which exists if the run is finished."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def source_names(self) -> dict[str, str]:
        """The names of its sources by their keys, as its result has them."""
        return {key: variant.name for key, variant in self.sources.items()}

    @property
    def overrides(self) -> list[str]:
        """`key=value` over the base: everything that makes the run.

        Raises:
            CheckpointError: a run that it begins with has no best checkpoint to be scored by.
        """
        return [*self.own_overrides, *self._from_sources()]

    @property
    def own_overrides(self) -> list[str]:
        """The same without the runs that it begins with or learns from."""
        return [
            *self.variant.overrides,
            f"seed={self.seed}",
            *place_of(self.study.config, str(self.folder), self.variant.config.data.kind),
        ]

    @property
    def checked_overrides(self) -> list[str]:
        """`own_overrides` that a run may be checked or tried with before its sources are there."""
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
        """The checkpoints that the others are scored by."""
        for key, variant in self.sources.items():
            folder = run_folder(self.study.folder, variant.name, self.seed)
            path = best_checkpoint(folder) if variant.scores_best else folder
            yield f"{key}={json.dumps(str(path))}"


def folder_of(study: StudyConfig, task: str) -> Path:
    """The folder of a study's task; the study's own for a task without a name."""
    return Path(study.folder, task)


def run_folder(study: Path, variant: str, seed: int) -> Path:
    """The folder of a run in that of a study, or of its task."""
    return study / "runs" / variant / f"seed-{seed}"


def place_of(study: StudyConfig, folder: str, kind: str) -> list[str]:
    """`key=value` for the folder of a run and the data of all, of some kind."""
    place = [f"run.folder={json.dumps(folder)}"]
    if study.data is not None:
        place.append(f"data.path={json.dumps(study.data.path)}")
        place += ["data.mixture=null"] if is_text(kind) else []
    return place


def _defining_keys(config: RunConfig) -> dict[str, Any]:
    flat = flatten(json.loads(json.dumps(config.model_dump(mode="json"))))
    judged = config.checkpoint.keep_best or config.evaluation.patience is not None
    counted: tuple[str, ...] = OF_THE_BEST if judged else ()
    counted += OF_REWINDS if config.monitor.spike_action == "rewind" else ()
    return {k: v for k, v in flat.items() if k in counted or not below(k, WITHOUT_EFFECT)}


def is_text(kind: str) -> bool:
    """Whether data of a kind is text that `polyad prepare` makes."""
    return kind in TASKS and issubclass(TASKS[kind].data_settings, DataConfig)


def changed_key(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first key that two runs differ in, with both values; None if they do not."""
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            return f"{key}: {before.get(key)!r} there, {after.get(key)!r} here"
    return None
