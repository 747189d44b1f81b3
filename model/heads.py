"""Heads of language models that score a whole sequence, in place of the next token.

Shapes: B sequences, D width, K classes.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.config import Config
from polyad.model.initialization import Initializer, normal

HEAD = "head."
"""How the names of a head's parameters begin."""


class ClassificationHeadConfig(Config):
    """Scores of a sequence: of each class, or one number."""

    kind: Literal["classification"] = "classification"
    """Which head this is."""
    num_classes: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Classes K; 1 for regression and for the score of a choice; null: the data decides."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Probability, of what the last layer reads; null: that of the model."""

    def known_dropout(self, of_model: float) -> float:
        """The dropout, which may be that of the model."""
        return of_model if self.dropout is None else self.dropout

    def known_num_classes(self) -> int:
        """The number of classes, which must have been filled in.

        Raises:
            ValueError: It is still None.
        """
        if self.num_classes is None:
            raise ValueError(
                "model.head.num_classes is not set: give a number, or take it from the data"
            )
        return self.num_classes


class SequenceHead(nn.Module):
    """A linear layer without a bias, as that of transformers' `GPT2ForSequenceClassification`.

    Args:
        config: With the number of classes.
        width: D.
        dropout: Probability, of what the head reads.
        initializer_std: Standard deviation of the initial weights.
    """

    def __init__(
        self,
        config: ClassificationHeadConfig,
        width: int,
        dropout: float,
        initializer_std: float,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.known_num_classes(), width))
        self.dropout = nn.Dropout(dropout)
        self._initializer_std = initializer_std

    def initializers(self) -> dict[str, Initializer]:
        """Starts as the token embedding does; see `model/initialization.py`."""
        return {"weight": normal(self._initializer_std)}

    def forward(self, z_BD: Tensor) -> Tensor:
        """Scores each class, [B, K].

        Args:
            z_BD: What stands for each sequence.
        """
        return linear(self.dropout(z_BD), self.weight)
