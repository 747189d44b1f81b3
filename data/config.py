"""The base of every configuration model in this room, and the keys under `data:`."""

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """Keyword-only, frozen, validated; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class DataConfig(Config):
    """Which prepared text a run reads, and how."""

    path: str | None = None
    """Folder made by `polyad prepare`: tokens of train, validation and test, and the tokenizer."""

    num_workers: int = Field(default=0, ge=0)
    """Loader processes beside each training process; 0 reads in the training process itself."""
