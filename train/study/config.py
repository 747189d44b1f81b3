"""The keys of a study: one run's file, ways to change it, seeds, and what is measured.

`train/study/study.py` checks them against each other and makes runs of them.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from data.errors import MAX_NAME_BYTES, check_path
from model.config import Config
from train.errors import shown

PathText = Annotated[str, AfterValidator(check_path)]
NAME = r"[A-Za-z0-9][\w.+-]*"
"""The form of a variant's name, which is also a folder's."""


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


class StudyConfig(Config):
    """What is compared, on what, how often."""

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
    """Whether the experts of finished runs on images are left out one by one, as `evaluate
    --specialization` does."""
    common: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys that every run has other than the base."""
    variants: dict[str, dict[str, Any]]
    """By name, the dotted keys that make the variant; in the order of the tables."""

    @field_validator("variants")
    @classmethod
    def _names_can_be_folders(cls, variants: dict[str, Any]) -> dict[str, Any]:
        for name in variants:
            if not re.fullmatch(NAME, name) or len(name.encode()) > MAX_NAME_BYTES:
                raise ValueError(
                    f"variants: {shown(name)} is not allowed: letters, digits and any of _ . + - "
                    f"are, a letter or digit first, at most {MAX_NAME_BYTES} bytes"
                )
        return variants

    @field_validator("variants", mode="before")
    @classmethod
    def _nothing_is_no_keys(cls, variants: Any) -> Any:
        """`dense:` without a value is a variant without keys of its own."""
        if not isinstance(variants, dict):
            return variants
        return {str(name): keys if keys is not None else {} for name, keys in variants.items()}

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
