"""Output heads: for a vocabulary, whose rows may be split over ranks; for classes of sequences, in
decoders and BERT; and for masked tokens.

Shapes: B sequences, T tokens in one, P positions that are scored, D width, V vocabulary, K classes.
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.config import Config
from polyad.model.feedforward import ACTIVATIONS
from polyad.model.initialization import ZEROS, Initializer, normal
from polyad.model.kernels.linear_cross_entropy import (
    VocabularyPart,
    linear_cross_entropy,
    token_scores,
)
from polyad.model.layers import LayerNorm, Linear, Region, same

HEAD = "head."
"""Name prefix of a head's parameters."""


class VocabularyHead(nn.Module):
    """Scores the vocabulary, whose rows may be split over ranks.

    Args:
        vocab_size: V.
        width: D, if it has a matrix of its own; None: it uses the token embedding.
        bias: Whether it has a bias.
        initializer_std: Standard deviation of the initial weights.
        ranked: Whether it returns without gradients whether each target scores highest.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int | None = None,
        *,
        bias: bool = False,
        initializer_std: float = 0.0,
        ranked: bool = False,
    ) -> None:
        super().__init__()
        self.weight = None if width is None else nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self._initializer_std, self._ranked = initializer_std, ranked
        self.input: Region = same
        """Applied to the input of the product with the vocabulary."""
        self.part: VocabularyPart | None = None
        """The rows on this rank; None for the whole vocabulary, without padding."""

    def initializers(self) -> dict[str, Initializer]:
        """Initializes a matrix like the token embedding; see `model/initialization.py`."""
        return {"weight": normal(self._initializer_std), "bias": ZEROS}

    def forward(
        self,
        x_BTD: Tensor,
        embedding_VD: Tensor | None = None,
        target_ids_BT: Tensor | None = None,
    ) -> Tensor:
        """Scores every token of the vocabulary.

        Args:
            x_BTD: The residual stream after the last norm, or the vectors of scored positions.
            embedding_VD: The token embedding; only used without a matrix of its own.
            target_ids_BT: The targets, to compute a loss.

        Returns:
            Logits [B, T, V]; with targets, without storing logits, their mean loss, or where no
            gradients are computed the loss of each [B, T], in a ranked head [B, T, 2] with 1 where
            the target scores highest.
        """
        weight_VD = embedding_VD if self.weight is None else self.weight
        assert weight_VD is not None
        x_BTD = self.input(x_BTD)
        if target_ids_BT is None:
            logits_BTV = linear(x_BTD, weight_VD, self.bias)
            return logits_BTV if self.part is None else self.part.without_padding(logits_BTV)
        flat = x_BTD.flatten(0, 1), weight_VD, target_ids_BT.flatten(), self.part, self.bias
        if torch.is_grad_enabled():
            return linear_cross_entropy(*flat)
        losses_N, best_N = token_scores(*flat)
        if not self._ranked:
            return losses_N.view_as(target_ids_BT)
        both_N2 = torch.stack([losses_N, best_N.to(losses_N.dtype)], dim=-1)
        return both_N2.view(*target_ids_BT.shape, 2)


class ClassificationHeadConfig(Config):
    """A head for whole sequences: one logit per class, or a single number."""

    kind: Literal["classification"] = "classification"
    """The kind of head."""
    num_classes: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Number of classes K; 1 for regression and for scoring choices; null: derived from the
    data."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout probability for the input of the last layer; null: the model's dropout."""

    def known_dropout(self, of_model: float) -> float:
        """Returns the dropout, by default the model's."""
        return of_model if self.dropout is None else self.dropout


class SequenceHead(Linear):
    """A linear layer without a bias, like that of transformers' `GPT2ForSequenceClassification`,
    initialized like the token embedding.

    Args:
        width: D.
        classes: K.
        dropout: Dropout probability of the head's input.
        initializer_std: Standard deviation of the initial weights.
    """

    def __init__(self, width: int, classes: int, dropout: float, initializer_std: float) -> None:
        super().__init__(width, classes, normal(initializer_std), bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z_BD: Tensor) -> Tensor:
        """Scores each class, [B, K].

        Args:
            z_BD: The representation of each sequence.
        """
        return super().forward(self.dropout(z_BD))


class MaskedLanguageHead(nn.Module):
    """A layer with an activation and LayerNorm, then the vocabulary.

    Args:
        config: The model's `BertConfig`, which builds it and so is not imported here.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.transform = Linear(width, width, normal(config.initializer_range))
        self.activation = ACTIVATIONS[config.activation]
        self.norm = LayerNorm(width, eps=config.layer_norm_epsilon)
        self.decoder = VocabularyHead(config.number("vocab_size"), bias=True, ranked=True)

    def forward(
        self, x_BPD: Tensor, embedding_VD: Tensor, target_ids_BP: Tensor | None = None
    ) -> Tensor:
        """Scores every token of the vocabulary; see `VocabularyHead.forward`.

        Args:
            x_BPD: The last block's output at the positions to score.
            embedding_VD: The token embedding.
            target_ids_BP: The targets, to compute a loss.
        """
        x_BPD = self.norm(self.activation(self.transform(x_BPD)))
        scored: Tensor = self.decoder(x_BPD, embedding_VD, target_ids_BP)
        return scored


class Pooler(nn.Module):
    """A tanh layer on the first token, whose output represents the sequence.

    Args:
        width: D.
        initializer_std: Standard deviation of the initial weight.
    """

    def __init__(self, width: int, initializer_std: float) -> None:
        super().__init__()
        self.dense = Linear(width, width, normal(initializer_std))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns the representation of each sequence, [B, D]."""
        return torch.tanh(self.dense(x_BTD[:, 0]))


class ClassificationHead(nn.Module):
    """The pooler, dropout, and a linear layer.

    Args:
        width: D.
        classes: K.
        dropout: Dropout probability of the last layer's input.
        initializer_std: Standard deviation of the initial weights.
    """

    def __init__(self, width: int, classes: int, dropout: float, initializer_std: float) -> None:
        super().__init__()
        self.pooler = Pooler(width, initializer_std)
        self.dropout = nn.Dropout(dropout)
        self.classifier = Linear(width, classes, normal(initializer_std))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Computes logits of each sequence [B, K] from the last block's output."""
        logits_BK: Tensor = self.classifier(self.dropout(self.pooler(x_BTD)))
        return logits_BK
