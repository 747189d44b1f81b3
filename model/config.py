"""The base of every configuration model in this room."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Keyword-only, frozen, validated; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
