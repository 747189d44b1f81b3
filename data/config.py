"""The base class of every configuration model in this package, and the keys under `data:`."""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from polyad.data.errors import check_path, user_path

LARGEST_WHOLE_NUMBER = 2**63 - 1
LARGEST, SMALLEST = 1e30, 1e-30
"""Bounds on the magnitude of other numbers: products of a few of them stay finite in fp32."""


class Config(BaseModel):
    """Keyword-only, frozen, validated; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _number_can_be_computed_with(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST_WHOLE_NUMBER:
            raise ValueError(f"Input should be at most {LARGEST_WHOLE_NUMBER}")
        if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
            raise ValueError(f"Input should be from {SMALLEST:g} to {LARGEST:g} in magnitude")
        return value


class MixtureSource(Config):
    """One of the prepared folders of a data mixture."""

    path: Annotated[str, AfterValidator(check_path)]
    """Folder created by `polyad prepare`."""

    weight: float = Field(ge=1e-9, le=1e9, allow_inf_nan=False)
    """Relative weight: the fraction of the training samples is this weight divided by the sum of
    all weights."""

    name: Annotated[str, Field(pattern=r"^[\w.+-]+$")] | None = None
    """Name under which its validation loss is reported; null: the name of the folder."""

    @property
    def label(self) -> str:
        """The given name, or the folder's."""
        return self.name or user_path(self.path).resolve().name


class DataSettings(Config):
    """The keys that every kind of data has."""

    kind: str
    """What the data is, and so what is learned from it."""

    num_workers: int = Field(default=0, ge=0, le=1024)
    """Data loader processes per training process; 0 loads in the training process itself."""


class DataConfig(DataSettings):
    """Prepared text, and how it is read."""

    kind: Literal["text"] = "text"
    """Text for next-token prediction."""

    path: Annotated[str | None, AfterValidator(check_path)] = None
    """Folder created by `polyad prepare`, with the tokens of the train, validation and test splits
    and the tokenizer."""

    mixture: list[MixtureSource] | None = Field(default=None, min_length=1)
    """Several prepared folders instead of one `path`, all prepared with the same tokenizer."""

    @model_validator(mode="after")
    def _path_or_mixture(self) -> "DataConfig":
        if self.mixture is None:
            return self
        if self.path is not None:
            raise ValueError(
                f"data.mixture: is not allowed together with data.path: {self.path}; give one of "
                "the two"
            )
        labels = Counter(source.label for source in self.mixture)
        label, count = labels.most_common(1)[0]
        if count > 1:
            raise ValueError(
                f"data.mixture: {count} folders have the name {label}; give each its own name, as "
                "in {path: ..., weight: 1, name: other}"
            )
        return self


class MaskedTextConfig(DataConfig):
    """Prepared text for masked language modelling, and how it is read."""

    kind: Literal["masked_text"] = "masked_text"  # type: ignore[assignment]
    """Text in which some tokens are masked, and predicted from the tokens on both sides."""
