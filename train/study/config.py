"""The keys of a study: one file of a run, ways to change it, seeds, and what is measured; and the
points of a grid: all combinations of the values that a study tries for some keys.

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
    """One combination."""

    name: str
    """As `learning_rate=2.0e-5,top_k=16`, which is a folder's name too; empty without a grid."""
    keys: Mapping[str, Any]
    """Its value of each dotted key."""


def points(grid: Mapping[str, Sequence[Any]]) -> list[Point]:
    """All combinations, the last key's values fastest.

    Args:
        grid: the values of each dotted key; none make one point without a name.

    Raises:
        ValueError: two points would have one name.
    """
    found = [
        Point(_name(keys), keys)
        for values in itertools.product(*grid.values())
        for keys in (dict(zip(grid, values, strict=True)),)
    ]
    names = [point.name for point in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twice)} is there twice")
    return found


def as_written(value: Any) -> str:
    """A value as YAML that reads back as the same value, also for a folder called 0012."""
    if isinstance(value, Written):
        return value.text
    return json.dumps(value, default=lambda written: written.value)


def _name(keys: Mapping[str, Any]) -> str:
    """Keys by their last parts where those differ."""
    short = {key: key.rpartition(".")[2] for key in keys}
    if len(set(short.values())) < len(short):
        short = {key: key for key in keys}
    return ",".join(f"{short[key]}={_plain(as_written(value))}" for key, value in keys.items())


def _plain(text: str) -> str:
    """A value without what a folder's name should not have."""
    return re.sub(r"[^\w.+-]+", "-", text.strip('[]{}"'))


PathText = Annotated[str, AfterValidator(check_path)]
NAME = r"[A-Za-z0-9][\w.+-]*"
"""The form of a variant's name, which is also a folder's."""
RunKey = Literal["checkpoint.init_from", "distill.teacher"]
"""Keys that name a run: the weights that a run begins with, and what it learns from."""


class StudyData(Config):
    """The text or the images of all runs."""

    path: PathText
    """Folder of prepared data; it is prepared from `source` if it is not there."""
    source: str | None = None
    """As `--source` of `polyad prepare`, or `--images`; null: the folder has to be there."""
    tokenizer: str | None = None
    """As `--tokenizer` of `polyad prepare`; needed with a source of text."""
    validation_fraction: float = 0.05
    """Share of the documents, or of the training images, held out for validation."""
    test_fraction: float = 0.05
    """Share of the documents held out for the test; images have one or none."""


class StudyAttack(Config):
    """An attack on what every run is scored on once more, as that of `evaluate`."""

    rate: Annotated[float, Field(ge=0, le=1)]
    """Share of the words that become AAA; of images the standard deviation of Gaussian noise on
    pixels from 0 to 1."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Which words, or which noise; the same for all runs."""


class StudyLeak(Config):
    """What runs with `causal_graph: false` are scored on once more, as `evaluate --leak` does."""

    steps: list[Annotated[int, Field(ge=1)]]
    """Checkpoints that are scored: steps of training."""
    tokens: Annotated[int, Field(ge=1)] = 2048
    """About how many tokens are scored from their prefix."""

    @field_validator("steps")
    @classmethod
    def _steps_rise(cls, steps: list[int]) -> list[int]:
        if not steps or steps != sorted(set(steps)):
            raise ValueError("at least one step is, each later than the one before")
        return steps


class StudyKnockout(Config):
    """What is lost without each expert of a language model, as `evaluate --knockout` says."""

    tokens: Annotated[int, Field(ge=1)] = 16_384
    """About how many tokens are read."""
    layers: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Blocks whose experts are left out; []: the first, the middle and the last that routes."""


class StudyConfig(Config):
    """What is compared, on what, how often."""

    question: str | None = None
    """What the study asks, in one sentence, as the page of its result shows it; null: nothing."""
    not_shown: str | list[str] | None = None
    """What its result does not show, in plain text, or in several that are a paragraph each; null:
    nothing is said."""
    base: PathText
    """A run's configuration file, relative to where the command is started."""
    folder: PathText
    """Holds a run folder for each variant and seed, study.json and results.json."""
    data: StudyData | None = None
    """The data of all runs, prepared if need be; null: what the base file names."""
    split: Literal["validation", "test"] = "validation"
    """Whose tokens every run is scored on."""
    seeds: list[Annotated[int, Field(ge=0, le=2**63 - 1)]]
    """One run of each variant for each: initial weights and order of the data."""
    baseline: str
    """The variant that the others are compared with."""
    attack: StudyAttack | None = None
    """What finished runs are scored on beside the split itself; null: nothing."""
    leak: StudyLeak | None = None
    """How runs whose tokens see later ones are scored without that; null: they are not."""
    specialization: bool = False
    """Whether it is measured how the experts of finished runs divide the work, as `evaluate
    --specialization` does: entropies, information on classes, how alike experts are, and of images
    what is lost without each."""
    knockout: StudyKnockout | None = None
    """How it is measured what the experts of finished runs are for; text and masked text alone.
    null: it is not."""
    measures: list[str] = Field(default_factory=list)
    """Names of further measures: `splice`, of replaced feed-forwards (`experts splice`), and those
    that a plugin adds."""
    common: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys that every run has other than the base."""
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By name, the dotted keys that make the task, `data.path` and the like: every variant is
    trained on each, and compared on each and on their mean. Without any there is one."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Dotted keys with the values that are tried: every variant is trained with each combination,
    and is compared with the one that is best on the validation split."""
    grids: dict[str, dict[str, list[Any]]] = Field(default_factory=dict)
    """By the name of a variant, more such keys that it alone has."""
    grid_seeds: Annotated[int, Field(ge=1)] | None = None
    """The first seeds, with which all combinations are trained; the others train the best one
    alone. null: all seeds."""
    from_runs: dict[str, dict[RunKey, str]] = Field(default_factory=dict)
    """By the name of a variant, the dotted keys whose value is the run of another variant with the
    same seed, as {distilled: {checkpoint.init_from: attentive}}."""
    variants: dict[str, dict[str, Any]]
    """By name, the dotted keys that make the variant; in the order of the tables."""

    @field_validator("question", "not_shown")
    @classmethod
    def _text_says_something(
        cls, text: str | list[str] | None, info: ValidationInfo
    ) -> str | list[str] | None:
        texts = [] if text is None else [text] if isinstance(text, str) else text
        if text == [] or not all(each.strip() for each in texts):
            raise ValueError(f"{info.field_name}: is empty; text is allowed, or null")
        return text

    @field_validator("variants", "tasks")
    @classmethod
    def _names_can_be_folders(cls, named: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        for name in named:
            if not re.fullmatch(NAME, name) or len(name.encode()) > MAX_NAME_BYTES:
                raise ValueError(
                    f"{info.field_name}: {shown(name)} is not allowed: letters, digits and any of "
                    f"_ . + - are, a letter or digit first, at most {MAX_NAME_BYTES} bytes"
                )
        return named

    @field_validator("variants", "tasks", mode="before")
    @classmethod
    def _nothing_is_no_keys(cls, named: Any) -> Any:
        """`dense:` without a value is a variant without keys of its own."""
        if not isinstance(named, dict):
            return named
        return {str(name): keys if keys is not None else {} for name, keys in named.items()}

    @model_validator(mode="after")
    def _grids_belong_to_variants(self) -> "StudyConfig":
        for name in self.grids:
            if name not in self.variants:
                raise ValueError(f"grids: {shown(name)} is no variant: {', '.join(self.variants)}")
        grids = {"grid": self.grid} | {f"grids.{name}": each for name, each in self.grids.items()}
        for where, grid in grids.items():
            for key, values in grid.items():
                if not values:
                    raise ValueError(f"{where}.{key}: [] is not allowed: at least one value is")
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
                raise ValueError(f"from_runs: {shown(name)} is no variant: {known}")
            for key, other in keys.items():
                if other not in self.variants:
                    raise ValueError(
                        f"from_runs.{name}: {key}: {shown(other)} is no variant: {known}"
                    )
        try:
            self.training_order()
        except CycleError as error:
            # graphlib names each after what needs it.
            circle = " from ".join(reversed(error.args[1]))
            raise ValueError(f"from_runs: {circle} is a circle, which has no beginning") from None
        return self

    def training_order(self) -> list[str]:
        """The variants' names, each after those whose runs it begins with or learns from.

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
            raise ValueError("at least one seed is")
        if len(set(seeds)) < len(seeds):
            raise ValueError("a seed stands twice; different ones are")
        return seeds

    @model_validator(mode="after")
    def _baseline_is_a_variant(self) -> "StudyConfig":
        if self.baseline not in self.variants:
            raise ValueError(
                f"baseline: {shown(self.baseline)} is not allowed: {', '.join(self.variants)}"
                if self.variants
                else "variants: {} is not allowed: at least one is"
            )
        return self
