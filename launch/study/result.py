"""A study's plan, and its result: what finished runs come to, as `results.json` has it.

Sentences, tables, the figure and the page are views of it, of a study that goes on as of a result
that was kept. In JSON some keys are named after what the task counts and is scored by, as
`tokens_scored` and `loss`.
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
"""JSON has no NaN, which the deviation of one run and the interval of one pair are."""


Finite = Annotated[
    float | None,
    BeforeValidator(
        lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    ),
]
"""A number of one run; None: it is not known, or not finite."""


class Form(BaseModel):
    """A part of a result. Keys that are not known, as of another version, are left out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Spread(Form):
    """A number of several runs."""

    mean: Number
    """NaN if none of them is finite."""
    deviation: Number
    """The sample standard deviation; NaN of one run."""
    runs: int


class Difference(Form):
    """A number of runs less that of the baseline's runs with the same seeds."""

    mean: Number
    deviation: Number
    low: Number
    """The lower end of the mean's interval; NaN of one pair."""
    high: Number
    pairs: int
    seeds: list[int]
    differences: list[Number]
    """One of each seed."""
    excludes_zero: bool
    """Whether 0 is outside the interval."""


class Relation(Form):
    """How a measure goes with the score: rank correlations over variants, one of each seed."""

    mean: Number
    deviation: Number
    low: Number
    high: Number
    pairs: int
    variants: int
    """Variants that have the measure."""
    seeds: list[int]
    values: list[Number]
    excludes_zero: bool


class Leak(Form):
    """What later tokens are worth to a variant at one checkpoint, and what is left without them."""

    seeds: list[int]
    reported: Spread
    """The loss with later tokens in sight."""
    prefix_tokens: int
    prefix_standard_error: Number
    masked: Spread
    """The loss with the mask."""
    masked_leak: Difference
    masked_beside_baseline: Difference | None
    prefix: Spread
    """The loss of tokens that are scored from their prefix."""
    prefix_leak: Difference
    prefix_beside_baseline: Difference | None


class Validation(Form):
    """Validations of a variant's runs at one step of training."""

    step: int
    seen: int
    """Tokens or images by then, the mean over seeds."""
    score: Spread
    difference: Difference | None
    """None for the baseline."""


class VariantSize(Form):
    """How large a variant is, and what it is trained with."""

    parameters: int
    active_parameters: int
    flops: int
    """FLOPs of a token or an image, in training."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Steps, batches and the like, as `polyad validate` describes them."""


class VariantResult(VariantSize):
    """What one variant came to."""

    point: str
    """The point of its grid that is compared; empty without a grid."""
    seeds: list[int]
    scores: dict[str, Spread]
    training_loss: Spread
    rate: Spread
    """Tokens or images a second."""
    routing: dict[str, Spread]
    """What its routers did, by measure."""
    measures: dict[str, Spread]
    """All by which variants are compared, the first score among them."""
    difference: Difference | None
    """The difference of the first score; None without a pair, and for the baseline."""
    differences: dict[str, Difference]
    """The differences of all measures."""
    leak: dict[str, Leak]
    """By step."""
    curve: list[Validation]


class Environment(Form):
    """What trained some of the runs."""

    git_commit: str | None
    versions: dict[str, str]
    platform: str
    gpus: list[str]
    uncommitted_changes: bool
    runs: int


class About(Form):
    """What is said of the study itself."""

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
    """Variants whose tokens see later ones."""
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
    """How what was scored once more was attacked."""

    rate: Number
    seed: int


class StudyFacts(Form):
    """What plan and result say of a study without tasks, or of one task."""

    study: str
    folder: str
    baseline: str
    unit: str
    """What the task counts: token or image."""
    scores: Annotated[list[Score], Field(min_length=1)]
    """The most important one first."""
    validation_score: str
    higher_is_better: bool
    seeds: list[int]
    swept_seeds: list[int]
    """Seeds with which all points of a grid are trained."""


class PlannedRun(Form):
    """A run whose variant and seed are known."""

    variant: str
    """Its variant, at a point of the grid."""
    seed: int
    finished: bool
    step: int
    """The step of its newest checkpoint; 0: there is none."""


class MeasuresTaken(Form):
    """How many measures of finished runs are wanted, and are there."""

    wanted: int
    taken: int


class StudyPlan(StudyFacts):
    """What a study will train, and what of it stands."""

    groups: dict[str, list[str]]
    """The points of each variant's grid, as keys of `variants`."""
    from_runs: dict[str, dict[str, str]]
    variants: dict[str, VariantSize]
    num_runs: int
    """Runs in all, those at points that are not chosen yet among them."""
    runs: list[PlannedRun]
    measures: MeasuresTaken

    def to_json(self) -> dict[str, Any]:
        """The form that `polyad study --dry-run --json` writes."""
        names = {"flops": f"flops_per_{self.unit}"}
        tree = self.model_dump()
        tree["variants"] = {name: _renamed(each, names) for name, each in tree["variants"].items()}
        return tree


class StudyPlans(Form):
    """The plan of a study, or those of its tasks, and how long what is left takes."""

    study: str
    plans: dict[str, StudyPlan]
    """By the names of tasks; one without a name if there are none."""
    seconds_left: float | None
    """None where no time is known."""
    time: str
    """The same for people; empty if nothing is left."""

    def to_json(self) -> dict[str, Any]:
        """The form that `polyad study --dry-run --json` writes."""
        each = {name: plan.to_json() for name, plan in self.plans.items()}
        tree = each.get("") or {"study": self.study, "tasks": each}
        return tree | {"seconds_left": self.seconds_left, "time": self.time}


Numbers = dict[str, int | float | None]
"""Numbers by name; None: one is not finite."""


class LeakOfRun(Form):
    """What later tokens are worth to a run at one checkpoint, as `polyad evaluate --leak` says."""

    loss: float
    """The loss with later tokens in sight."""
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
    """What a run was validated to at one step of training."""

    step: int
    seen: int
    """Tokens or images by then."""
    score: float


class Measured(Form):
    """What was measured of a finished run; what was not is not set."""

    attack: Numbers | None = None
    """Scores of attacked data."""
    leak: dict[str, LeakOfRun] = Field(default_factory=dict)
    """By step."""
    experts: dict[str, Numbers] = Field(default_factory=dict)
    """The numbers of each measure of experts; in JSON beside the others."""
    fluctuation: Fluctuation | None = None
    head_changes: float | None = None
    validations: list[RunValidation] | None = None
    """What it was validated to while it was trained, oldest first."""
    leaks: bool = False
    """Whether its tokens see later ones."""

    def to_json(self, unit: str) -> dict[str, Any]:
        """The keys of what is set."""
        tree = self.model_dump(exclude_unset=True)
        for each in tree.get("validations") or ():
            each[f"{unit}s"], each["score"] = each.pop("seen"), each.pop("score")
        found: dict[str, Any] = {}
        for name, value in tree.items():
            found |= value if name == "experts" else {name: value}
        return found

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], unit: str) -> Self:
        """What `to_json` wrote; every other key with numbers is a measure of experts."""
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
    """What a finished run came to, and what was measured of it."""

    variant: str
    point: str = ""
    seed: int
    from_runs: dict[str, str] = Field(default_factory=dict)
    """The variant, at its point, with whose run it began or that it learned from; by key."""
    validation: Finite = None
    """The score on the validation split of the checkpoint that is scored."""
    scores: dict[str, Finite]
    """None where a point of a grid diverged, which others are better than."""
    scored: int | None
    """Tokens or images that it was scored on."""
    step: int
    training_loss: Finite
    rate: Finite
    """Tokens or images a second."""
    memory_bytes: int | None = None
    routing: dict[str, Finite]
    seconds: float | None
    """How long it took; None if it was not done in one go."""
    jobs: int = 1
    """Runs that were trained at a time."""
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
    """Tokens or images that each run is scored on."""
    confidence: Number
    variants: dict[str, VariantResult]
    relations: dict[str, Relation]
    runs: list[RunResult]
    """The runs that are compared."""
    swept: list[RunResult]
    """The runs at other points of grids."""
    environment: dict[str, Any]
    grids: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    """The mean validation of each point of a variant's grid."""
    split: str = ""
    attack: Attack | None = None
    about: About = About()
    beside: str | None = None
    """The variant that others are compared with in place of the study's baseline."""

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
    """One variant that is finished on all tasks."""

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
    """Tasks that were begun."""
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
    """The result of each task that was begun; the whole one without a name if there are none."""
    return result.tasks if isinstance(result, TasksResult) else {"": result}


def kept_result(path: Path) -> Result:
    """A result as `polyad study` wrote it: its `results.json`, wherever that is kept.

    Raises:
        ConfigError: it cannot be read, or is none.
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
    """Within the block a kept result is read or shown, which may hold anything.

    Args:
        path: of the result.

    Raises:
        ConfigError: it has another form than `polyad study` gives it.
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
    """A tree in its order, some keys with other names.

    Args:
        tree: of a result.
        names: the new names.
        before: what is put in before a key.
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= {**(before or {}).get(key, {}), names.get(key, key): value}
    return found
