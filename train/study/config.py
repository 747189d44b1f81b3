"""The keys of a study: one run configuration, ways to change it, seeds, and what is measured; and
the points of a grid: all combinations of the values that a study tries for some keys.

`train/study/study.py` checks them against each other and makes runs of them.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from polyad.data.errors import MAX_NAME_BYTES, check_path
from polyad.model.config import Config
from polyad.model.config_yaml import Written
from polyad.train.errors import shown


class Point(NamedTuple):
    """One combination of grid values."""

    name: str
    """Keys and values, `learning_rate=2.0e-5,top_k=16`; also a folder's name. Empty: no grid."""
    keys: Mapping[str, Any]
    """The value of each dotted key."""


def points(grid: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Returns all combinations; the last key varies fastest.

    Args:
        grid: the values of each dotted key; if empty, there is one point without a name.

    Raises:
        ValueError: two points would have the same name.
    """
    found = [
        Point(_name(keys), keys)
        for values in itertools.product(*grid.values())
        for keys in (dict(zip(grid, values, strict=True)),)
    ]
    names = [point.name for point in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twice)} is given twice")
    return found


def as_written(value: Any) -> str:
    """Formats a value as YAML that reads back as the same value, even for a folder called 0012."""
    if isinstance(value, Written):
        return value.text
    return json.dumps(value, default=lambda written: written.value)


def _name(keys: Mapping[str, Any]) -> str:
    """Names a point by the last parts of its keys, if these differ."""
    short = {key: key.rpartition(".")[2] for key in keys}
    if len(set(short.values())) < len(short):
        short = {key: key for key in keys}
    return ",".join(f"{short[key]}={_plain(as_written(value))}" for key, value in keys.items())


def _plain(text: str) -> str:
    """Removes what a folder's name should not contain from a value."""
    return re.sub(r"[^\w.+-]+", "-", text.strip('[]{}"'))


PathText = Annotated[str, AfterValidator(check_path)]
NAME = r"[A-Za-z0-9][\w.+-]*"
"""Allowed names of variants, which are also names of folders."""
RunKey = Literal["checkpoint.init_from", "distill.teacher"]
"""Keys whose value is a run: the initial weights, and the teacher."""


class StudyData(Config):
    """The data of all runs."""

    path: PathText
    """Folder of prepared data, which is prepared from `source` if it does not exist."""
    source: str | None = None
    """What `polyad prepare` takes as `--source`, or as `--images`; null: the folder must already
    exist."""
    tokenizer: str | None = None
    """What `polyad prepare` takes as `--tokenizer`; needed if `source` is text."""
    validation_fraction: float = 0.05
    """Fraction of the text, or of the training images, held out for validation."""
    test_fraction: float = 0.05
    """Fraction of the text held out for the test split; not for images, which come with a test
    split or have none."""


class StudyAttack(Config):
    """A perturbation under which every run is scored once more, as with `polyad evaluate
    --attack`."""

    rate: Annotated[float, Field(ge=0, le=1)]
    """Fraction of the words that are replaced with AAA; for images, the standard deviation of
    Gaussian noise for pixel values in 0 to 1."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Random seed for the choice of words or the noise, the same for all runs."""


class StudyLeak(Config):
    """How runs with `causal_graph: false` are scored once more without the leak, as with `polyad
    evaluate --leak`."""

    steps: list[Annotated[int, Field(ge=1)]]
    """Training steps whose checkpoints are scored."""
    tokens: Annotated[int, Field(ge=1)] = 2048
    """Approximate number of tokens that are scored from their prefix alone."""

    @field_validator("steps")
    @classmethod
    def _steps_rise(cls, steps: list[int]) -> list[int]:
        if not steps or steps != sorted(set(steps)):
            raise ValueError("give at least one step, each later than the one before")
        return steps


class StudyKnockout(Config):
    """The loss without each expert of a language model, as in `polyad experts knockout`."""

    tokens: Annotated[int, Field(ge=1)] = 16_384
    """Approximate number of tokens to read."""
    layers: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Blocks whose experts are removed; []: the first, middle and last block with experts."""


class StudyConfig(Config):
    """A study: which variants are compared, on which data, with which seeds."""

    question: str | None = None
    """The question of the study in one sentence, shown on the page of its result; null: not
    shown."""
    not_shown: str | list[str] | None = None
    """Limitations, what the result does not show: plain text, or a list of paragraphs; null: not
    shown."""
    base: PathText
    """Configuration file of a run, relative to the working directory."""
    folder: PathText
    """Folder of the study, for one run folder per variant and seed, study.json and results.json."""
    data: StudyData | None = None
    """The data of all runs, prepared if necessary; null: the data that the base file names."""
    split: Literal["validation", "test"] = "validation"
    """Split on which every run is scored."""
    seeds: list[Annotated[int, Field(ge=0, le=2**63 - 1)]]
    """Random seeds (for initial weights and the order of the data); each variant is trained once
    with each seed."""
    baseline: str
    """Name of the variant with which the others are compared."""
    attack: StudyAttack | None = None
    """A perturbation under which finished runs are scored too; null: none."""
    leak: StudyLeak | None = None
    """How runs in which tokens see later tokens are scored again without that; null: they are
    not."""
    specialization: bool = False
    """Whether to measure how the experts of finished runs divide the work, as in `polyad experts
    specialize`: entropies, information about classes, similarity of experts, and for images what is
    lost without each expert."""
    knockout: StudyKnockout | None = None
    """How to measure what the experts of finished runs are for, by removing them; only for text and
    masked text. null: not measured."""
    measures: list[str] = Field(default_factory=list)
    """Names of further measures: `splice` for replaced feed-forwards (see `polyad experts splice`),
    and measures added by plugins."""
    common: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys that are set in every run, different from the base."""
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Maps names of tasks to the dotted keys that define them, such as `data.path`. Every variant
    is trained on each task, and compared on each and on their mean. Empty: a single task."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Grid search: maps dotted keys to lists of values. Every variant is trained with each
    combination, and compared with the combination that is best on the validation split."""
    grids: dict[str, dict[str, list[Any]]] = Field(default_factory=dict)
    """Maps names of variants to additional grid keys for that variant alone."""
    grid_seeds: Annotated[int, Field(ge=1)] | None = None
    """Number of seeds, from the first, with which all combinations are trained; with the other
    seeds only the best one is trained. null: all seeds."""
    from_runs: dict[str, dict[RunKey, str]] = Field(default_factory=dict)
    """Maps names of variants to dotted keys whose value is the run of another variant with the same
    seed, for example {distilled: {checkpoint.init_from: attentive}}."""
    variants: dict[str, dict[str, Any]]
    """Maps names of variants, in the order of the tables, to the dotted keys that define them."""

    @field_validator("question", "not_shown")
    @classmethod
    def _text_says_something(
        cls, text: str | list[str] | None, info: ValidationInfo
    ) -> str | list[str] | None:
        texts = [] if text is None else [text] if isinstance(text, str) else text
        if text == [] or not all(each.strip() for each in texts):
            raise ValueError(f"{info.field_name}: is empty; give text, or null")
        return text

    @field_validator("variants", "tasks")
    @classmethod
    def _names_can_be_folders(cls, named: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        for name in named:
            if not re.fullmatch(NAME, name) or len(name.encode()) > MAX_NAME_BYTES:
                raise ValueError(
                    f"{info.field_name}: {shown(name)} is not allowed; a name has letters, digits "
                    "and any of _ . + -, starts with a letter or digit, and has at most "
                    f"{MAX_NAME_BYTES} bytes"
                )
        return named

    @field_validator("variants", "tasks", mode="before")
    @classmethod
    def _nothing_is_no_keys(cls, named: Any) -> Any:
        """Reads `dense:` without a value as a variant without its own keys."""
        if not isinstance(named, dict):
            return named
        return {str(name): keys if keys is not None else {} for name, keys in named.items()}

    @model_validator(mode="after")
    def _grids_belong_to_variants(self) -> "StudyConfig":
        for name in self.grids:
            if name not in self.variants:
                raise ValueError(
                    f"grids: {shown(name)} is not a variant; variants: {', '.join(self.variants)}"
                )
        grids = {"grid": self.grid} | {f"grids.{name}": each for name, each in self.grids.items()}
        for where, grid in grids.items():
            for key, values in grid.items():
                if not values:
                    raise ValueError(f"{where}.{key}: [] is not allowed; give at least one value")
        if self.grid_seeds is not None and not 1 <= self.grid_seeds <= len(self.seeds):
            raise ValueError(
                f"grid_seeds: {self.grid_seeds} is not allowed with {len(self.seeds)} seeds"
            )
        return self

    @model_validator(mode="after")
    def _runs_are_those_of_variants_before(self) -> "StudyConfig":
        known = ", ".join(self.variants)
        for name, keys in self.from_runs.items():
            if name not in self.variants:
                raise ValueError(f"from_runs: {shown(name)} is not a variant; variants: {known}")
            for key, other in keys.items():
                if other not in self.variants:
                    raise ValueError(
                        f"from_runs.{name}: {key}: {shown(other)} is not a variant; variants: "
                        f"{known}"
                    )
        try:
            self.training_order()
        except CycleError as error:
            # graphlib lists each node after the one that needs it.
            circle = " from ".join(reversed(error.args[1]))
            raise ValueError(
                f"from_runs: {circle} is a cycle, so none of these runs can start"
            ) from None
        return self

    def training_order(self) -> list[str]:
        """The variants' names, each after those from whose runs it starts or learns.

        Raises:
            CycleError: there is no such order.
        """
        graph = {name: self.from_runs.get(name, {}).values() for name in self.variants}
        waiting, order = list(self.variants), []
        TopologicalSorter(graph).prepare()
        while waiting:
            ready = next(name for name in waiting if not set(graph[name]) & set(waiting))
            waiting.remove(ready)
            order.append(ready)
        return order

    @field_validator("seeds")
    @classmethod
    def _seeds_are_several_and_differ(cls, seeds: list[int]) -> list[int]:
        if not seeds:
            raise ValueError("give at least one seed")
        if len(set(seeds)) < len(seeds):
            raise ValueError("a seed appears twice; all seeds must be different")
        return seeds

    @model_validator(mode="after")
    def _baseline_is_a_variant(self) -> "StudyConfig":
        if self.baseline not in self.variants:
            raise ValueError(
                f"baseline: {shown(self.baseline)} is not a variant; variants: "
                f"{', '.join(self.variants)}"
                if self.variants
                else "variants: {} is not allowed; give at least one variant"
            )
        return self
