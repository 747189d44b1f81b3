"""Studies: variants of a run, each trained with several seeds, compared in pairs.

Runs with one seed read the same batches in the same order, and start from the same weights wherever
they have the same parameters. The seed's effect on both cancels in their difference.

FOLDER/[TASK/]runs/VARIANT/[POINT/]seed-N        a run
FOLDER/[TASK/]runs/VARIANT/[POINT/]seed-N.json   its configuration and, once finished, its result
FOLDER/results.json                              the comparison, updated after every run
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pandas
from filelock import FileLock, Timeout
from pydantic import AfterValidator, Field, ValidationError, model_validator
from scipy import stats

from polyad.data.errors import check_path, prefixed
from polyad.data.files import read_json, write_whole
from polyad.model.build import count_parameters
from polyad.model.config import Config, flatten
from polyad.train.config.adaptation import model_of, unused_parameters
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, build_config, read_tree
from polyad.train.config.text import DOTTED_KEY, below, describe
from polyad.train.errors import ConfigError, RunError, shown, stop_signal, stopped
from polyad.train.guard.run_folder import check_place
from polyad.train.loop import metrics as records
from polyad.train.results import json_value
from polyad.train.start import open_plan
from polyad.train.tasks.random_input import flops_of_unit
from polyad.train.tasks.registry import TASKS, open_task
from polyad.train.tasks.task import Task

CONFIDENCE = 0.95
"""The share of such studies whose interval contains the true mean."""
IN_PAIRS = ("data", "train.steps", "train.global_batch_size", "model.sequence_length",
            "evaluation.stride")  # fmt: skip
"""Keys or sections that may not differ between variants: they determine the batches, or the scored
tokens and their context."""
WITHOUT_EFFECT = ("seed", "run", "log", "checkpoint.every", "evaluation.batch_size", "data.path",
                  "data.mixture", "data.num_workers")  # fmt: skip
"""Keys or sections that may change between starts of a study. The data is compared itself."""
Keys = dict[str, Any]
Values = dict[str, Annotated[list[Any], Field(min_length=1)]]
POINT = ["task", "variant", "point"]
MEANS = ["runs", "mean", "deviation", "difference", "low", "high", "pairs"]
PathText = Annotated[str, AfterValidator(check_path)]
Polyad = Callable[..., int]
"""Runs `polyad` with some arguments in a child process, and returns its exit status."""


class StudyConfig(Config):
    """A study: which variants are compared, with which seeds."""

    base: PathText
    """Configuration file of a run, relative to the working directory."""
    folder: PathText
    """Folder of the study, for one run folder per variant and seed, and results.json."""
    split: Literal["validation", "test"] = "validation"
    """Split on which every run is scored."""
    seeds: Annotated[list[Annotated[int, Field(ge=0, le=2**63 - 1)]], Field(min_length=1)]
    """Random seeds (for initial weights and the order of the data); each variant is trained once
    with each seed."""
    baseline: str
    """Name of the variant with which the others are compared."""
    common: Keys = Field(default_factory=dict)
    """Dotted keys that are set in every run, different from the base."""
    tasks: dict[str, Keys | None] = Field(default_factory=dict)
    """Maps names of tasks to the dotted keys that define them, such as `data.path`. Every variant
    is trained on each task, and compared on each and on their mean. Empty: a single task."""
    grid: Values = Field(default_factory=dict)
    """Grid search: maps dotted keys to lists of values. Every variant is trained with each
    combination, and compared with the combination that is best on the validation split."""
    grids: dict[str, Values] = Field(default_factory=dict)
    """Maps names of variants to additional grid keys for that variant alone."""
    grid_seeds: Annotated[int, Field(ge=1)] | None = None
    """Number of seeds, from the first, with which all combinations are trained; with the other
    seeds only the best one is trained. null: all seeds."""
    variants: dict[str, Keys | None]
    """Maps names of variants, in the order of the tables, to the dotted keys that define them.
    `{seed}` in a value is the run's seed: `FOLDER/runs/dense/seed-{seed}` is the run of the variant
    `dense`, which must come before a variant that starts from it or learns from it."""

    @model_validator(mode="after")
    def _names_fit(self) -> "StudyConfig":
        for name in [*self.variants, *self.tasks]:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]{,254}", name):
                raise ValueError(
                    f"variants, tasks: {shown(name)} is not allowed; a name has letters, digits "
                    "and any of _ . + -, starts with a letter or digit, and has at most 255 bytes"
                )
        for key, name in [("baseline", self.baseline), *(("grids", name) for name in self.grids)]:
            if name not in self.variants:
                variants = ", ".join(self.variants) or "none"
                raise ValueError(f"{key}: {shown(name)} is not a variant; variants: {variants}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: one appears twice; all seeds must be different")
        if (self.grid_seeds or 0) > len(self.seeds):
            raise ValueError(f"grid_seeds: {self.grid_seeds}: there are {len(self.seeds)} seeds")
        return self


class Run(NamedTuple):
    """A variant of one task at one point of its grid with one seed."""

    task: str
    """Empty if there are no tasks."""
    variant: str
    point: str
    """The point's keys and values, `learning_rate=2.0e-5,top_k=16`; empty without a grid."""
    seed: int
    folder: Path
    overrides: list[str]
    """Overrides of the base as `key=value`."""
    config: RunConfig
    """The configuration of the last seed, without what depends on the data."""

    def __str__(self) -> str:
        """The name of the run in messages."""
        task, at = f"{self.task}, " * bool(self.task), f" at {self.point}" * bool(self.point)
        return f"{task}{self.variant}{at}, seed {self.seed}"

    @property
    def file(self) -> Path:
        """The file of its result."""
        return self.folder.with_name(f"{self.folder.name}.json")


@dataclass(frozen=True, eq=False)
class Study:
    """A study's file, checked without its data."""

    file: Path
    config: StudyConfig
    runs: list[Run]
    """All runs at all points, task by task and seed by seed."""

    @property
    def task(self) -> type[Task[Any]]:
        """The task of all runs."""
        return TASKS[self.runs[0].config.data.kind]

    @property
    def swept(self) -> list[int]:
        """The seeds with which all points are trained."""
        return self.config.seeds[: self.config.grid_seeds]


def load_study(file: Path) -> Study:
    """Reads a study and checks every variant as far as possible without data.

    Raises:
        ConfigError: one line names the key, and the variant if it belongs to one.
    """
    tree = read_tree(file)
    if "model" in tree and "base" not in tree:
        raise ConfigError(f"{file}: is the file of a run; `polyad train {file}` starts it")
    try:
        config = StudyConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{file}: {describe(error, StudyConfig)}") from None
    with prefixed(f"{file}: base", ConfigError):
        base = read_tree(Path(config.base))
    runs = [
        run
        for task in config.tasks or [""]
        for variant in config.variants
        for run in _runs(file, config, base, task, variant)
    ]
    first: dict[str, dict[str, Any]] = {}
    for run in runs:
        ours = flatten(run.config.model_dump(mode="json"))
        theirs = first.setdefault(run.task, ours)
        for key in sorted(ours.keys() | theirs.keys()):
            if below(key, IN_PAIRS) and ours.get(key) != theirs.get(key):
                raise ConfigError(
                    f"{file}: variants.{run.variant}: {key}: {shown(ours.get(key))} differs from "
                    f"{shown(theirs.get(key))} of {runs[0].variant}: runs with the same seed would "
                    "not see the same batches; set it under common"
                )
    if len(kinds := {tree["data.kind"] for tree in first.values()}) > 1:
        raise ConfigError(f"{file}: tasks: data.kind: {' and '.join(sorted(kinds))} differ")
    runs.sort(key=lambda run: ([*first].index(run.task), config.seeds.index(run.seed)))
    return Study(file, config, runs)


def _runs(
    file: Path, study: StudyConfig, base: dict[str, Any], task: str, variant: str
) -> Iterator[Run]:
    """The runs of a variant on a task: at each point of its grid, with each seed."""
    where = f"{file}: variants.{variant}"
    grid = study.grid | study.grids.get(variant, {})
    own_keys = study.variants[variant] or {}
    if both := grid.keys() & own_keys.keys():
        raise ConfigError(f"{where}: {min(both)}: is not allowed, because a grid sets it too")
    overrides: list[str] = []
    for place, keys in (
        (f"{file}: common", study.common),
        (f"{file}: tasks.{task}", study.tasks.get(task) or {}),
        (where, own_keys),
    ):
        overrides += _overrides(keys, place)
        with prefixed(place, ConfigError):
            build_config(base, [*overrides, "run.folder=x"], origin=study.base)
    names = set()
    for values in itertools.product(*grid.values()):
        keys = dict(zip(grid, values, strict=True))
        own, name = [*overrides, *_overrides(keys, f"{file}: grid")], _name(keys)
        if name in names:
            raise ConfigError(f"{file}: grid: {name} is given twice")
        names.add(name)
        folder = Path(study.folder, task, "runs", variant, name)
        with prefixed(where + f" at {name}" * bool(name), ConfigError):
            longest = json.dumps(str(folder / f"seed-{max(study.seeds)}"))
            config = build_config(base, [*own, f"run.folder={longest}"], origin=study.base)
            validate(config, 1)
            config.model.filled()
        for seed in study.seeds:
            run = folder / f"seed-{seed}"
            each = [value.replace("{seed}", str(seed)) for value in own]
            each += [f"seed={seed}", f"run.folder={json.dumps(str(run))}"]
            yield Run(task, variant, name, seed, run, each, config)


def _overrides(keys: Mapping[str, Any], where: str) -> list[str]:
    """Dotted keys as `key=value`; JSON is YAML."""
    for key in keys:
        if not DOTTED_KEY.fullmatch(key):
            raise ConfigError(f"{where}: {shown(key)} is not a dotted key such as train.steps")
        if key.partition(".")[0] in ("seed", "run"):
            raise ConfigError(f"{where}: {key}: is not allowed: see seeds and folder")
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def _name(keys: Mapping[str, Any]) -> str:
    """Names a point by the last parts of its keys, if these differ; also a folder's name."""
    last = [key.rpartition(".")[2] for key in keys]
    names = last if len(set(last)) == len(last) else list(keys)
    values = [re.sub(r"[^\w.+-]+", "-", json.dumps(v).strip('[]{}"')) for v in keys.values()]
    return ",".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def results_of(study: Study) -> pandas.DataFrame:
    """Reads the results of all runs.

    Returns:
        A row for each run, in order: `task`, `variant`, `point`, `seed`; `state`, which is
        finished, started or empty; `compared`, see `points_of`; and of finished ones what
        `_result` returns.

    Raises:
        ConfigError: a run had another configuration than the study's file says.
        RunError: all points of a grid diverged.
    """
    rows = []
    for run in study.runs:
        row = {"task": run.task, "variant": run.variant, "point": run.point, "seed": run.seed}
        row |= {"state": "", "validation": None, "data": None}
        if run.file.exists():
            record, now = read_json(run.file, error=ConfigError), _definition(study, run)
            if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
                raise ConfigError(f"{run.file}: was not written by a study")
            before = record.pop("config")
            for key in sorted(before.keys() & now.keys()):
                if before[key] != now[key]:
                    raise ConfigError(
                        f"{study.file}: variants.{run.variant}: {key}: {shown(before[key])} there, "
                        f"{shown(now[key])} here: {run.folder} has the earlier value; change the "
                        "key back, choose another folder, or give the variant another name"
                    )
            row |= {"state": "finished" if "step" in record else "started", **record}
        rows.append(row)
    frame = pandas.DataFrame(rows).astype({"validation": float})
    return frame.merge(points_of(study, frame)[[*POINT, "compared"]], on=POINT, how="left")


def _definition(study: Study, run: Run) -> dict[str, Any]:
    """The keys on which the results of a run depend, with their values."""
    flat = flatten(run.config.model_dump(mode="json")) | {"split": study.config.split}
    return {key: value for key, value in flat.items() if not below(key, WITHOUT_EFFECT)}


def points_of(study: Study, frame: pandas.DataFrame) -> pandas.DataFrame:
    """Chooses the point of each grid that is compared.

    Returns:
        A row for each point of each variant: `validation`, its mean score over the seeds of the
        sweep (NaN: not all are finished, or one diverged), `finished`, and `compared`: the best,
        or the first of several that are. None is before all of its grid are finished.

    Raises:
        RunError: all points of a grid diverged.
    """
    points = (
        frame[frame.seed.isin(study.swept)]
        .groupby(POINT, sort=False)
        .agg(
            validation=("validation", lambda scores: scores.mean(skipna=False)),
            finished=("state", lambda states: (states == "finished").all()),
        )
        .reset_index()
        .assign(compared=False)
    )
    for (task, variant), grid in points.groupby(["task", "variant"], sort=False):
        best = grid.index[0]
        if len(grid) > 1:
            if not grid.finished.all():
                continue
            if grid.validation.isna().all():
                raise RunError(
                    f"{study.file}: grid: {task} {variant}: no point has a finite validation "
                    "score; choose other values, or remove the variant"
                )
            scores = grid.validation
            best = scores.idxmax() if study.task.higher_is_better else scores.idxmin()
        points.loc[best, "compared"] = True
    return points


def finish_runs(study: Study, polyad: Polyad, say: Callable[[str], None]) -> pandas.DataFrame:
    """Trains and scores all unfinished runs, one after the other.

    Several starts of a study share the work: a run that another start has begun is left to it.

    Args:
        study: the study.
        polyad: runs a command.
        say: prints a line about the progress.

    Returns:
        The results.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong. Nothing was started.
        RunError: a run failed; finished ones are kept.
        Stopped: or KeyboardInterrupt, by a signal; the running command has ended.
    """
    frame, elsewhere, config = results_of(study), set[int](), study.config
    check_place(Path(config.folder), f"{study.file}: folder")
    for index in frame[frame.state != "finished"].groupby(POINT).head(1).index:
        run = study.runs[index]
        data = open_plan(Path(config.base), run.overrides, 1).task
        for split in {config.split, *(["validation"] if run.point else [])}:
            data.check_split(split)
        if set(frame[frame.task == run.task].data.dropna()) - {data.fingerprint}:
            place = f"{config.folder}; choose another folder"
            raise ConfigError(f"{study.file}: {run}: has other data than finished runs in {place}")
    say(plan_text(study, frame))
    while True:
        _write(Path(config.folder, "results.json"), to_json(study, frame))
        can_begin = frame.compared | frame.seed.isin(study.swept)
        left = frame.index[can_begin & (frame.state != "finished") & ~frame.index.isin(elsewhere)]
        if not len(left):
            return frame
        run = study.runs[left[0]]
        lock = FileLock(run.folder.with_name(f".{run.folder.name}.lock"), timeout=0)
        try:
            held = lock.acquire()
        except Timeout:
            say(f"{run}: is left to another start of this study, which has begun it")
            elsewhere.add(left[0])
            continue
        with held:
            total, finished = progress(study, frame)
            say(f"\n== run {finished + 1} of {total}: {run}")
            _finish(study, run, polyad)
        frame = results_of(study)


def _finish(study: Study, run: Run, polyad: Polyad) -> None:
    """Trains a run to its end and scores it, from wherever it is."""
    _write(run.file, record := {"config": _definition(study, run)})
    may_diverge = bool(run.point) and run.seed in study.swept
    written, scores = run.file.with_suffix(".evaluation"), None
    which = ["--split", study.config.split, *["--best"] * run.config.checkpoint.keep_best]
    for command in (
        ("train", study.config.base, *run.overrides),
        ("evaluate", str(run.folder), *which, "--json", str(written)),
    ):
        status = polyad(*command)
        if (number := stop_signal(status)) is not None:
            raise stopped(number, f"{run}: run the same command again to continue this run")
        if status == 1 and may_diverge and _has_diverged(study, run):
            break
        if status:
            raise RunError(
                f"{run}: `polyad {command[0]}` ended with status {status}; run the same command "
                "again to continue with this run (finished ones are kept)"
            )
    else:
        scores = read_json(written)
        written.unlink()
        if scores[study.task.scores[0].name] is None and not may_diverge:
            raise RunError(f"{run}: its {study.task.scores[0].title} is not finite")
    _write(run.file, record | _result(study, run, scores))


def _write(path: Path, tree: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(json_value(tree), indent=1) + "\n")


def _has_diverged(study: Study, run: Run) -> bool:
    """Whether a run ended because its last steps, or its last validation, were not finite."""
    most = run.config.train.max_skipped_steps
    last = records.read_records(run.folder)[-most:]
    if None in (last[-1].get(name, 0) for name in ("validation_loss", study.task.validation_score)):
        return True
    bad = (r.get("skipped") and None in (r.get("loss"), r.get("grad_norm")) for r in last)
    return len(last) == most and all(bad)


def _result(study: Study, run: Run, scores: Mapping[str, Any] | None) -> dict[str, Any]:
    """The result of a run.

    Args:
        study: its study.
        run: the run.
        scores: what `polyad evaluate` wrote; None: it diverged, and all scores are null.
    """
    task, lines = study.task, records.read_records(run.folder)
    unit, keep_best = f"{task.unit.name}s", run.config.checkpoint.keep_best
    scored = (record.get(task.validation_score) for record in lines)
    curve = [score for score in scored if score is not None]
    validation = None
    if scores is not None and curve:
        best = max if task.higher_is_better else min
        validation = best(curve) if keep_best else curve[-1]
    return {
        "step": scores["step"] if scores else lines[-1]["step"],
        "data": open_task(run.config.for_task()).fingerprint,
        "scored": scores and scores[f"{unit}_scored"],
        "validation": validation,
        **{score.name: scores and scores[score.name] for score in task.scores},
        "training_loss": records.last_loss(lines),
        "rate": records.median_rate(lines, task.unit.name),
        **records.last_routing(lines),
        **records.last_fluctuation(lines),
    }


def compare(study: Study, frame: pandas.DataFrame) -> pandas.DataFrame:
    """Compares the variants of finished runs with the baseline, in pairs of one seed.

    Args:
        study: the study.
        frame: its results.

    Returns:
        A row for each task (and for the mean of several, of the first score alone), measure and
        variant: `runs`, `mean` and `deviation` over them, and what `interval` returns.
    """
    compared = frame[frame.compared & (frame.state == "finished")]
    named = [score.name for score in study.task.scores] + ["training_loss", "rate"]
    measures = [m for m in frame if m in named or str(m).startswith(("routing/", "fluctuation/"))]
    rows: list[dict[str, Any]] = []
    for task, part in compared.groupby("task", sort=False):
        for measure in measures:
            table = part.pivot(index="seed", columns="variant", values=measure)
            rows += _compared(study, table, {"task": task, "measure": measure})
    if len(study.config.tasks) > 1 and len(compared):
        table = compared.pivot(index=["variant", "seed"], columns="task", values=named[0])
        means = table.reindex(columns=[*study.config.tasks]).astype(float).mean(1, skipna=False)
        rows += _compared(study, means.unstack(0), {"task": "mean of tasks", "measure": named[0]})
    return pandas.DataFrame(rows, columns=["task", "measure", "variant", *MEANS])


def _compared(
    study: Study, table: pandas.DataFrame, keys: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Compares the columns, one for each variant, of a table with a row for each seed."""
    table, baseline = table.astype(float), study.config.baseline
    for variant in filter(table.__contains__, study.config.variants):
        values = table[variant].dropna()
        if len(values):
            theirs = table[baseline] if baseline in table and variant != baseline else values[:0]
            row = {"variant": variant, "runs": len(values), "mean": values.mean()}
            row |= {"deviation": values.std()} | interval([*(values - theirs).dropna()])
            yield keys | row


def interval(differences: Sequence[float]) -> dict[str, float]:
    """Computes the mean of paired differences and its interval by Student's t distribution.

    Returns:
        `difference`, `low` and `high`: mean +- t(n - 1) x deviation / sqrt(n) at `CONFIDENCE`,
        which assumes that differences are normally distributed; NaN without at least two. `pairs`.
    """
    count, half = len(differences), math.nan
    mean = sum(differences) / count if count else math.nan
    if count > 1:
        half = stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1) * stats.sem(differences)
    return {"difference": mean, "low": mean - half, "high": mean + half, "pairs": count}


@functools.cache
def sizes(study: Study) -> pandas.DataFrame:
    """Returns parameters, active parameters and FLOPs of training per token or image, by variant;
    none where they depend on data that does not exist."""
    rows = {}
    for run in {run.variant: run for run in study.runs}.values():
        config = run.config
        with suppress(ValueError):
            config = config.model_copy(update={"model": open_task(config.for_task()).model})
        if config.model.left_to_data() is None:
            model = model_of(config)
            parameters, flops = count_parameters(model), flops_of_unit(config.model, config.data)
            rows[run.variant] = parameters, parameters - unused_parameters(model), flops
    columns = ["parameters", "active", "flops"]
    return pandas.DataFrame.from_dict(rows, orient="index", columns=columns)


def to_json(study: Study, frame: pandas.DataFrame) -> dict[str, Any]:
    """The content of results.json: facts, sizes, the comparison, points of grids, and all runs."""
    config, total = study.config, progress(study, frame)[0]
    facts = {"study": str(study.file)} | config.model_dump(include={"folder", "baseline", "split"})
    facts |= {"confidence": CONFIDENCE, "unit": study.task.unit.name, "num_runs": total}
    frames = {
        "sizes": sizes(study).reset_index(names="variant"),
        "comparison": compare(study, frame),
        "points": points_of(study, frame),
        "runs": frame[frame.state == "finished"],
    }
    rows = {
        name: json.loads(each.convert_dtypes().to_json(orient="records", double_precision=15))
        for name, each in frames.items()
    }
    return facts | {"scores": [score.name for score in study.task.scores], **rows}


def progress(study: Study, frame: pandas.DataFrame) -> tuple[int, int]:
    """Returns the numbers of all and of finished runs; with the seeds after those of the sweep only
    the best point of a grid is trained."""
    later = len(study.config.seeds) - len(study.swept)
    points = frame.groupby(["task", "variant"]).point.nunique()
    total = int((points * len(study.swept) + later).sum())
    return total, int((frame.state == "finished").sum())


def plan_text(study: Study, frame: pandas.DataFrame) -> str:
    """The size of each variant, and what is left to do."""
    total, finished = progress(study, frame)
    begun, config = int((frame.state == "started").sum()), study.config
    table = sizes(study).reindex([*config.variants]).astype(float)
    table.insert(0, "points", frame.groupby("variant").point.nunique())
    lines = [table.to_string(float_format="{:,.0f}".format, na_rep="-")]
    lines += ["-: not known without the data"] if table.isna().any(axis=None) else []
    state = f"{finished:,} finished, {begun:,} to continue, {total - finished - begun:,} to start"
    steps, seeds = study.runs[0].config.train.steps, ", ".join(map(str, config.seeds))
    lines.append(f"{total:,} runs of {steps:,} steps, seeds {seeds}: {state}")
    return "\n".join([*lines, f"baseline: {config.baseline}; in {config.folder}"])


def result_text(study: Study, frame: pandas.DataFrame) -> str:
    """The comparison, and the points of grids, as tables."""
    table, config, first = compare(study, frame), study.config, study.task.scores[0]
    table = table[table.groupby(["task", "measure"])["mean"].transform("any")]
    if table.empty:
        return "no variant can be compared yet"
    table["0 excluded"] = ((table.low > 0) | (table.high < 0)).map({True: "*", False: ""})
    numbers: dict[str, Any] = {"float_format": "{:,.5g}".format, "na_rep": ""}
    index = [*["task"] * bool(config.tasks), "measure", "variant"]
    parts = [table.set_index(index)[[*MEANS, "0 excluded"]].to_string(**numbers)]
    points = points_of(study, frame)[lambda each: each.point != ""]
    if len(points):
        parts.append(points.to_string(index=False, **numbers))
    notes = [
        f"on the {config.split} split; difference: a variant less {config.baseline} with the same "
        "seed; low, high: 95% interval of its mean over pairs (t distribution)",
    ]
    lost = frame.index[(frame.state == "finished") & frame[first.name].isna()]
    notes += [f"diverged: {study.runs[index]}" for index in lost]
    return "\n\n".join([*parts, "\n".join(notes)])


def draw(study: Study, frame: pandas.DataFrame, file: Path) -> None:
    """Draws each variant's difference from the baseline with its interval, side by side for tasks.

    Args:
        study: the study.
        frame: its results.
        file: ends in .pdf, .svg or .png.
    """
    score, table = study.task.scores[0], compare(study, frame)
    table = table[(table.measure == score.name) & (table.variant != study.config.baseline)]
    tasks = [*dict.fromkeys(table.task)] or [""]
    size = 1.5 + 3.5 * len(tasks), 0.3 * len(study.config.variants) + 2.5
    from matplotlib.figure import Figure  # not at the top: it takes a second

    figure = Figure(size, layout="constrained")
    for axis, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        part = table[table.task == task]
        half = (part.high - part.low) / 2
        axis.errorbar(part.difference, [*part.variant], xerr=half, fmt="o", capsize=3)
        axis.axvline(0, color="gray", linewidth=0.8)
        axis.invert_yaxis()
        axis.set_title(task)
        axis.set_xlabel(f"{score.title}: difference from {study.config.baseline}, 95% interval")
    figure.savefig(file)
