"""Heads that models of text share.

Shapes: K classes.
"""

from typing import Annotated, Literal

from pydantic import Field

from model.config import Config


class ClassificationHeadConfig(Config):
    """One of K classes for each sequence."""

    kind: Literal["classification"] = "classification"
    """Which head this is."""
    num_classes: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Classes K of the output; null: those of the data."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Probability, of what the last layer reads; null: that of the model."""
