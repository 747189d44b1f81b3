"""A study's plan, and its result as in `results.json`.

Sentences, tables, the figure and the page are views of a result, of a running study or a stored
one. In JSON some keys are named after the task's unit and scores, such as `tokens_scored` and
`loss`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from polyad.data.json_reader import read_json
from polyad.train.errors import ConfigError, shortened

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that may be NaN (null in JSON), such as the deviation of one run."""


Finite = Annotated[
    float | None,
    BeforeValidator(
        lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    ),
]
"""A number of one run; None if unknown or not finite."""


class Form(BaseModel):
    """A part of a result. Unknown keys, from other versions, are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Spread(Form):
    """Mean and spread of a number over several runs."""

    mean: Number
    """NaN if none of them is finite."""
    deviation: Number
    """Sample standard deviation; NaN for one run."""
    runs: int


class Difference(Form):
    """Difference of a number from the baseline's runs with the same seeds."""

    mean: Number
    deviation: Number
    low: Number
    """Lower end of the mean's interval; NaN for one pair."""
    high: Number
    pairs: int
    seeds: list[int]
    differences: list[Number]
    """One of each seed."""
    excludes_zero: bool
    """Whether 0 is outside the interval."""


class Relation(Form):
    """Relation of a measure to the score: rank correlations over variants, one per seed."""

    mean: Number
    deviation: Number
    low: Number
    high: Number
    pairs: int
    variants: int
    """Number of variants that have the measure."""
    seeds: list[int]
    values: list[Number]
    excludes_zero: bool


class Leak(Form):
    """The leak of later tokens for a variant at one checkpoint, and losses without them."""

    seeds: list[int]
    reported: Spread
    """Loss with later tokens visible."""
    prefix_tokens: int
    prefix_standard_error: Number
    masked: Spread
    """The loss with the mask."""
    masked_leak: Difference
    masked_beside_baseline: Difference | None
    prefix: Spread
    """Loss of tokens scored from their prefix."""
    prefix_leak: Difference
    prefix_beside_baseline: Difference | None


class Validation(Form):
    """Validations of a variant's runs at one step of training."""

    step: int
    seen: int
    """Tokens or images seen by then, averaged over seeds."""
    score: Spread
    difference: Difference | None
    """None for the baseline."""


class VariantSize(Form):
    """The size of a variant, and its training settings."""

    parameters: int
    active_parameters: int
    flops: int
    """Training FLOPs per token or image."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Steps, batches and the like, as `polyad validate` describes them."""


class VariantResult(VariantSize):
    """The result of one variant."""

    point: str
    """Its compared grid point; empty without a grid."""
    seeds: list[int]
    scores: dict[str, Spread]
    training_loss: Spread
    rate: Spread
    """Tokens or images per second."""
    routing: dict[str, Spread]
    """Routing statistics by measure."""
    measures: dict[str, Spread]
    """All measures by which variants are compared, including the first score."""
    difference: Difference | None
    """Difference of the first score; None without a pair, and for the baseline."""
    differences: dict[str, Difference]
    """The differences of all measures."""
    leak: dict[str, Leak]
    """By step."""
    curve: list[Validation]


class Environment(Form):
    """The environment in which some of the runs were trained."""

    git_commit: str | None
    versions: dict[str, str]
    platform: str
    gpus: list[str]
    uncommitted_changes: bool
    runs: int


class About(Form):
    """Facts about the study itself."""

    question: str | None = None
    not_shown: list[str] = Field(default_factory=list)
    """Paragraphs."""
    base: str = ""
    data: str | None = None
    source: str | None = None
    common: dict[str, str] = Field(default_factory=dict)
    """Dotted keys with their values as in the file, as of each of `variants` and `grids`."""
    variants: dict[str, dict[str, str]] = Field(default_factory=dict)
    grids: dict[str, dict[str, str]] = Field(default_factory=dict)
    leaking: list[str] = Field(default_factory=list)
    """Variants in which tokens see later ones."""
    days: list[str] = Field(default_factory=list)
    """The days of the first and the last finished run."""
    environments: list[Environment] = Field(default_factory=list)


class Score(Form):
    """A score of the task; see `polyad.train.tasks.task.Score`."""

    name: str
    title: str
    digits: Annotated[int, Field(ge=0, le=20)]
    unit: str


class Attack(Form):
    """The attack under which runs were scored again."""

    rate: Number
    seed: int


class StudyFacts(Form):
    """Facts in both plan and result, of a study without tasks or of one task."""

    study: str
    folder: str
    baseline: str
    unit: str
    """The task's unit: token or image."""
    scores: Annotated[list[Score], Field(min_length=1)]
    """The most important one first."""
    validation_score: str
    higher_is_better: bool
    seeds: list[int]
    swept_seeds: list[int]
    """Seeds with which all grid points are trained."""


class PlannedRun(Form):
    """A run whose variant and seed are known."""

    variant: str
    """Its variant, at a point of the grid."""
    seed: int
    finished: bool
    step: int
    """The step of its newest checkpoint; 0: there is none."""


class MeasuresTaken(Form):
    """Number of measures of finished runs that are wanted, and that exist."""

    wanted: int
    taken: int


class StudyPlan(StudyFacts):
    """The plan of a study, and its progress."""

    groups: dict[str, list[str]]
    """The points of each variant's grid, as keys of `variants`."""
    from_runs: dict[str, dict[str, str]]
    variants: dict[str, VariantSize]
    num_runs: int
    """Total number of runs, including those at points not chosen yet."""
    runs: list[PlannedRun]
    measures: MeasuresTaken

    def to_json(self) -> dict[str, Any]:
        """The form that `polyad study --dry-run --json` writes."""
        names = {"flops": f"flops_per_{self.unit}"}
        tree = self.model_dump()
        tree["variants"] = {name: _renamed(each, names) for name, each in tree["variants"].items()}
        return tree


class StudyPlans(Form):
    """The plan of a study, or the plans of its tasks, and the estimated remaining time."""

    study: str
    plans: dict[str, StudyPlan]
    """Plans by task name; one with an empty name if there are no tasks."""
    seconds_left: float | None
    """None if unknown."""
    time: str
    """The same as text; empty if nothing is left."""

    def to_json(self) -> dict[str, Any]:
        """The form that `polyad study --dry-run --json` writes."""
        each = {name: plan.to_json() for name, plan in self.plans.items()}
        tree = each.get("") or {"study": self.study, "tasks": each}
        return tree | {"seconds_left": self.seconds_left, "time": self.time}


Numbers = dict[str, int | float | None]
"""Numbers by name; None: one is not finite."""


class LeakOfRun(Form):
    """The leak of later tokens for a run at one checkpoint, from `polyad evaluate --leak`."""

    loss: float
    """Loss with later tokens visible."""
    masked_loss: float
    masked_tokens: int | None = None
    prefix_wanted: int | None = None
    prefix_tokens: int
    prefix_loss: float | None = None
    prefix_loss_in_window: float | None = None
    prefix_difference: float
    """The loss of tokens that are scored from their prefix, less that of the same in a window."""
    prefix_standard_error: Number

    @property
    def loss_from_prefix(self) -> float:
        """The loss of the split with the difference of the sample added.

        It spreads far less than the sample's own loss.
        """
        return self.loss + self.prefix_difference


class Fluctuation(Form):
    """Which tokens changed experts between the last two checkpoints, as `last_fluctuation` says."""

    top1: float
    set: float
    steps: float | int


class RunValidation(Form):
    """A run's validation at one step of training."""

    step: int
    seen: int
    """Tokens or images by then."""
    score: float


class Measured(Form):
    """Measures of a finished run; those not taken are not set."""

    attack: Numbers | None = None
    """Scores of attacked data."""
    leak: dict[str, LeakOfRun] = Field(default_factory=dict)
    """By step."""
    experts: dict[str, Numbers] = Field(default_factory=dict)
    """The numbers of each measure of experts; in JSON beside the others."""
    fluctuation: Fluctuation | None = None
    head_changes: float | None = None
    validations: list[RunValidation] | None = None
    """Validations during training, oldest first."""
    leaks: bool = False
    """Whether its tokens see later ones."""

    def to_json(self, unit: str) -> dict[str, Any]:
        """JSON values of the fields that are set."""
        tree = self.model_dump(exclude_unset=True)
        for each in tree.get("validations") or ():
            each[f"{unit}s"], each["score"] = each.pop("seen"), each.pop("score")
        found: dict[str, Any] = {}
        for name, value in tree.items():
            found |= value if name == "experts" else {name: value}
        return found

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], unit: str) -> Self:
        """Restores from `to_json`; every other key with numbers is a measure of experts."""
        known = {name: tree[name] for name in cls.model_fields if name in tree}
        if "validations" in known:
            known["validations"] = [
                {**each, "seen": each[f"{unit}s"]} for each in known["validations"]
            ]
        experts = {
            name: value
            for name, value in tree.items()
            if isinstance(value, dict)
            and name not in known
            and all(each is None or isinstance(each, int | float) for each in value.values())
        }
        return cls.model_validate(known | ({"experts": experts} if experts else {}))


class RunResult(Form):
    """The result of a finished run, and its measures."""

    variant: str
    point: str = ""
    seed: int
    from_runs: dict[str, str] = Field(default_factory=dict)
    """Variants at their grid point from whose runs it started or learned, by key."""
    validation: Finite = None
    """Validation score of the scored checkpoint."""
    scores: dict[str, Finite]
    """None if a grid point diverged, which ranks it last."""
    scored: int | None
    """Number of tokens or images on which it was scored."""
    step: int
    training_loss: Finite
    rate: Finite
    """Tokens or images per second."""
    memory_bytes: int | None = None
    routing: dict[str, Finite]
    seconds: float | None
    """Duration in seconds; None if it was interrupted."""
    jobs: int = 1
    """Number of concurrent runs."""
    measured: Measured = Measured()

    def to_json(self, unit: str) -> dict[str, Any]:
        """The form of a run's file, and of `runs` in `results.json`; `unit` as `token`."""
        tree = self.model_dump(exclude={"measured"})
        scores = tree.pop("scores")
        names = {"scored": f"{unit}s_scored", "rate": f"{unit}s_per_second"}
        return _renamed(tree, names, before={"scored": scores}) | self.measured.to_json(unit)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], unit: str, scores: Sequence[str]) -> Self:
        """The result that `to_json` wrote.

        Raises:
            LookupError: a key is missing; or another exception, if it has another form.
        """
        scored, rate = f"{unit}s_scored", f"{unit}s_per_second"
        known = {*cls.model_fields, *scores, scored, rate}
        return cls.model_validate(
            {
                **tree,
                "scores": {score: tree[score] for score in scores},
                "scored": tree[scored],
                "rate": tree[rate],
                "measured": Measured.from_json(
                    {key: value for key, value in tree.items() if key not in known}, unit
                ),
            }
        )


class StudyResult(StudyFacts):
    """The result of a study without tasks, or of one task."""

    finished: bool
    scored: int
    """Number of tokens or images on which each run is scored."""
    confidence: Number
    variants: dict[str, VariantResult]
    relations: dict[str, Relation]
    runs: list[RunResult]
    """The compared runs."""
    swept: list[RunResult]
    """The runs at other points of grids."""
    environment: dict[str, Any]
    grids: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    """The mean validation of each point of a variant's grid."""
    split: str = ""
    attack: Attack | None = None
    about: About = About()
    beside: str | None = None
    """The variant with which others are compared in place of the study's baseline."""

    def to_json(self) -> dict[str, Any]:
        """The form of `results.json`."""
        tree = self.model_dump(exclude={"variants", "beside"})
        for name, runs in (("runs", self.runs), ("swept", self.swept)):
            tree[name] = [run.to_json(self.unit) for run in runs]
        variants = {name: self._variant_to_json(each) for name, each in self.variants.items()}
        beside = {} if self.beside is None else {"beside": self.beside}
        names = {"scored": f"{self.unit}s_scored"}
        return _renamed(tree, names, before={"relations": {"variants": variants}}) | beside

    def _variant_to_json(self, variant: VariantResult) -> dict[str, Any]:
        tree = variant.model_dump()
        for each in tree["curve"]:
            score, difference = each.pop("score"), each.pop("difference")
            each[f"{self.unit}s"] = each.pop("seen")
            each |= {"score": score, "difference": difference}
        scores = tree.pop("scores")
        names = {"flops": f"flops_per_{self.unit}", "rate": f"{self.unit}s_per_second"}
        return _renamed(tree, names, before={"training_loss": scores})

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        """The result that `to_json` wrote.

        Raises:
            LookupError: a key is missing; or another exception, if it has another form.
        """
        unit, scores = tree["unit"], [score["name"] for score in tree["scores"]]
        variants = {
            name: {
                **each,
                "flops": each[f"flops_per_{unit}"],
                "scores": {score: each[score] for score in scores},
                "rate": each[f"{unit}s_per_second"],
                "curve": [{**step, "seen": step[f"{unit}s"]} for step in each["curve"]],
            }
            for name, each in tree["variants"].items()
        }
        runs, swept = (
            [RunResult.from_json(run, unit, scores) for run in tree[name]]
            for name in ("runs", "swept")
        )
        return cls.model_validate(
            {
                **tree,
                "variants": variants,
                "runs": runs,
                "swept": swept,
                "scored": tree[f"{unit}s_scored"],
            }
        )


class MeanOverTasks(Spread):
    """The mean of the first score over tasks, of several seeds."""

    values: list[Number]
    """One of each seed."""


class VariantOverTasks(Form):
    """A variant that is finished on all tasks."""

    mean: MeanOverTasks
    difference: Difference | None


class TasksResult(Form):
    """The result of a study with tasks."""

    study: str
    baseline: str
    unit: str
    scores: Annotated[list[Score], Field(min_length=1)]
    seeds: list[int]
    higher_is_better: bool
    about: About
    finished: bool
    variants: dict[str, VariantOverTasks]
    tasks: dict[str, StudyResult]
    """Tasks that were started."""
    beside: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The form of `results.json`."""
        tree = self.model_dump(exclude={"tasks", "beside"})
        tree["tasks"] = {name: each.to_json() for name, each in self.tasks.items()}
        return tree | ({} if self.beside is None else {"beside": self.beside})

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        """The result that `to_json` wrote; raises as `StudyResult.from_json`."""
        tasks = {name: StudyResult.from_json(each) for name, each in tree["tasks"].items()}
        return cls.model_validate({**tree, "tasks": tasks})


Result = StudyResult | TasksResult


def parts_of(result: Result) -> dict[str, StudyResult]:
    """The result of each started task; the whole result with an empty name if there are no
    tasks."""
    return result.tasks if isinstance(result, TasksResult) else {"": result}


def kept_result(path: Path) -> Result:
    """Loads a result from a `results.json` of `polyad study`.

    Raises:
        ConfigError: it cannot be read, or is not a result.
    """
    tree = read_json(path, error=ConfigError)
    keys = ("study", "baseline", "scores", "variants", "finished", "higher_is_better", "about")
    missing = [key for key in keys if not isinstance(tree, dict) or key not in tree]
    if missing:
        raise ConfigError(f"{path}: has no {missing[0]}, so it was not written by a study")
    with form_of(path):
        return TasksResult.from_json(tree) if "tasks" in tree else StudyResult.from_json(tree)


@contextmanager
def form_of(path: Path) -> Iterator[None]:
    """A context for reading or showing a stored result, which may contain anything.

    Args:
        path: path of the result.

    Raises:
        ConfigError: it does not have the form of `polyad study`'s results.
    """
    try:
        yield
    except ValidationError as error:
        found = error.errors()[0]
        reason = f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
    except (
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        ValueError,
        RecursionError,
    ) as error:
        if hasattr(error, "exit_status"):
            raise
        reason = f"{type(error).__name__}: {error}"
    else:
        return
    raise ConfigError(
        f"{path}: does not have the format of a result of `polyad study` ({shortened(reason)})"
    )


def _renamed(
    tree: Mapping[str, Any],
    names: Mapping[str, str],
    before: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Renames some keys of a tree, keeping its order.

    Args:
        tree: a result's tree.
        names: the new names.
        before: entries to insert before a key.
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= {**(before or {}).get(key, {}), names.get(key, key): value}
    return found
