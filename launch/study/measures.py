"""Measures of a study's finished runs beside their loss: calls of `polyad evaluate` on checkpoints,
with results stored beside the run's.

runs/VARIANT/seed-N.attack.json      the attacked text or images, if the study has `attack`
runs/VARIANT/seed-N.leak-STEP.json   the loss of a checkpoint whose tokens see later ones, with and
                                     without that, if the study has `leak`
runs/VARIANT/seed-N.specialization.json   how experts divide the work, if the study has
                                     `specialization`
runs/VARIANT/seed-N.knockout.json    what each expert is for, if the study has `knockout`

Measures added later use the existing checkpoints: nothing is trained again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyad.data.json_reader import read_json
from polyad.launch.study.folder import write_json
from polyad.launch.study.result import Measured
from polyad.train.errors import ConfigError, RunError
from polyad.train.measures.registry import MEASURES
from polyad.train.records import (
    METRICS_FILE,
    head_changes,
    last_fluctuation,
    read_records,
    validations,
)
from polyad.train.study.study import Run, Study, Variant

KEYS = ("loss", "split", "step", "attack")
"""Keys that are read from the output of `polyad evaluate`."""
OF_EXPERTS = ("split", "step")
"""Keys that the result of every measure of experts has."""
OWN_KEYS = ("specialization", "knockout")
"""Measures with their own keys in a study, not under `measures`."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One call of `polyad evaluate` for one run."""

    run: Run
    name: str
    """Suffix of its file, after the run's name."""
    path: Path
    """The run (its newest checkpoint), or one of its checkpoints."""
    options: tuple[str, ...]
    settings: dict[str, Any]
    """Settings recorded in its result."""
    command: tuple[str, ...] = ("evaluate",)
    """Arguments of `polyad`."""

    def __str__(self) -> str:
        """Its name for display."""
        return f"{self.name} of {self.run}"

    @property
    def kind(self) -> str:
        """The part of its name shared with measures of equal duration."""
        return self.name.partition("-")[0]

    @property
    def file(self) -> Path:
        """The file of its result."""
        return self.run.result_file.with_suffix(f".{self.name}.json")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `polyad`, without where the result goes."""
        split = ("--split", self.run.study.config.split)
        return *self.command, str(self.path), *split, *self.options

    @property
    def _keys(self) -> tuple[str, ...]:
        return OF_EXPERTS if self.kind in MEASURES else KEYS

    def read(self) -> dict[str, Any] | None:
        """Its result; None if there is none, or only one with other settings.

        Raises:
            ConfigError: it is damaged.
        """
        if not self.file.exists():
            return None
        tree = _read(self.file, self._keys)
        return tree if settings_of(tree) == self.settings else None

    def keep(self, written: Path) -> dict[str, Any]:
        """Stores the output of `polyad evaluate`.

        Raises:
            RunError: a loss is not finite.
        """
        tree = _read(written, self._keys)
        if self.kind in MEASURES:
            tree = {**MEASURES[self.kind].kept(tree), self.kind: self.settings[self.kind]}
        else:
            if tree["loss"] is None:
                raise RunError(f"{self}: a loss is not finite")
        write_json(self.file, tree)
        written.unlink()
        return tree


def settings_of(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings of a result that a study can choose."""
    for name in MEASURES:
        if name in tree:
            return {"split": tree["split"], name: tree[name]}
    if "layers" in tree:  # as earlier studies kept it
        return {"split": tree["split"], "specialization": True}
    attack = tree["attack"]
    return {
        "split": tree["split"],
        "attack": None if attack is None else [attack["rate"], attack["seed"]],
    }


def measures_of(run: Run) -> Iterator[Measure]:
    """Yields the measures that a study takes of a run, in order."""
    config = run.study.config
    allowed = [name for name in MEASURES if name not in OWN_KEYS]
    for name in config.measures:
        if name not in allowed:
            known = f"{', '.join(allowed)} are" if allowed else "no plugin adds any"
            raise ConfigError(f"{run.study.file}: measures: {name!r} is not allowed: {known}")
    best = ("--best",) if run.variant.scores_best else ()
    if (attack := config.attack) is not None:
        rate, seed = f"{attack.rate!r}", f"{attack.seed}"
        yield Measure(
            run=run,
            name="attack",
            path=run.folder,
            options=(*best, "--attack", f"{run.study.task.attack}", "--rate", rate, "--seed", seed),
            settings=_settings(run, attack=[attack.rate, attack.seed]),
        )
    model, has_experts = run.variant.config.model, run.variant.has_experts
    for name, kind in MEASURES.items():
        if not kind.is_for(model, has_experts=has_experts):
            continue
        if (asked := kind.of_study(config)) is not None:
            yield Measure(
                run=run,
                name=name,
                path=run.folder,
                command=asked.command,
                options=(*best, *asked.options),
                settings={"split": config.split, name: asked.settings},
            )


def _settings(run: Run, **given: Any) -> dict[str, Any]:
    return {"split": run.study.config.split, "attack": None} | given


def all_measures(study: Study, chosen: Mapping[str, Variant]) -> list[Measure]:
    """The measures of the runs that are compared, seed by seed.

    Args:
        study: the study.
        chosen: the compared point of each variant's grid, if known.
    """
    kept = [variant.name for variant in chosen.values()]
    runs = (run for run in study.runs(chosen) if run.variant.name in kept)
    return [measure for run in runs for measure in measures_of(run)]


def forget(run: Run) -> None:
    """Removes measures of an earlier run before it is trained again."""
    for file in run.result_file.parent.glob(f"{run.result_file.stem}.*.json"):
        file.unlink()


def read_measures(run: Run) -> Measured:
    """Reads the measures of a finished run."""
    found: dict[str, Any] = {}
    task = run.study.task
    for measure in measures_of(run):
        tree = measure.read()
        if tree is None:
            continue
        if measure.name == "attack":
            names = [*(score.name for score in task.scores[:2]), f"{task.unit.name}s_scored"]
            found["attack"] = {name: tree[name] for name in names}
            counted = ("words", "replaced")
            found["attack"] |= {k: v for k, v in tree["attack"].items() if k in counted}
        elif measure.kind in MEASURES:
            found.setdefault("experts", {})[measure.kind] = MEASURES[measure.kind].numbers(tree)
    if (run.folder / METRICS_FILE).exists():
        records, units = read_records(run.folder), f"{task.unit.name}s"
        if fluctuation := last_fluctuation(records):
            found["fluctuation"] = fluctuation
        if (changes := head_changes(records)) is not None:
            found["head_changes"] = changes
        found["validations"] = [
            {"step": each["step"], "seen": each[units], "score": each["score"]}
            for each in validations(records, task.validation_score, units)
        ]
    return Measured.model_validate(found)


def _read(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    tree = read_json(path, error=ConfigError)
    missing = [key for key in keys if not isinstance(tree, dict) or key not in tree]
    if missing:
        raise ConfigError(
            f"{path}: has no {missing[0]}, so it was not written by a study; remove it"
        )
    return dict(tree)
