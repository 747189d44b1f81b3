"""Masked language modelling: predicts hidden tokens of prepared text from both sides.

Shapes: B samples of a micro-batch, T tokens of a sample, P hidden ones.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyad.data.config import MaskedTextConfig
from polyad.data.text.dataset import TokenStream
from polyad.data.text.masking import (
    MaskedBatch,
    MaskedSamples,
    MaskedWindow,
    MaskedWindows,
    SpecialTokens,
)
from polyad.data.text.samples import MixedSamples, TrainingData
from polyad.model.bert import BertConfig, MaskedLanguageHeadConfig
from polyad.model.output import RoutingStats
from polyad.train.errors import ConfigError
from polyad.train.tasks.task import Predictor, Score, Scoring, Sections
from polyad.train.tasks.text import TextTask, with_vocabulary


def masked_losses(model: Predictor, batch: MaskedBatch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """Returns the mean loss of the hidden tokens, and the layers' routing statistics.

    Every sample has equally many hidden tokens, so the mean over processes is the mean of means.
    """
    loss, routing = model(
        batch.input_ids_BT, positions_BP=batch.positions_BP, target_ids_BP=batch.target_ids_BP
    )
    return loss, routing


class MaskedLanguageModelling(TextTask[MaskedBatch]):
    """Predicts hidden tokens, on one prepared folder or a mixture of several."""

    data_settings = MaskedTextConfig
    scores = (
        Score("loss", "loss", 4, "nats per masked token"),
        Score("accuracy", "accuracy", 4, "of masked tokens"),
    )
    loss_unit = "nats per masked token"
    model: BertConfig

    def __init__(self, data: TrainingData, sections: Sections) -> None:
        super().__init__(data, sections)
        model = sections.model
        head = getattr(model, "head", None)
        if not isinstance(model, BertConfig) or not isinstance(head, MaskedLanguageHeadConfig):
            read = f"model.kind: {model.kind} and model.head.kind: {getattr(head, 'kind', None)}"
            raise ConfigError(
                f"data.kind: masked_text is not allowed with {read}; allowed: bert and language"
            )
        self.model = with_vocabulary(model, data.tokenizer.vocab_size, self.place)
        self.special = SpecialTokens.of(data.parts[0].data.tokenizer(), self.place)
        self.num_hidden = head.num_masked(model.sequence_length)

    @functools.cached_property
    def samples(self) -> MaskedSamples:
        """Samples of T tokens, P of them hidden."""
        return MaskedSamples(self.tokens, self.num_hidden, self.special, self._seed)

    @functools.cached_property
    def tokens(self) -> MixedSamples:
        """The text between the special tokens: T - 2 tokens, and the first of the next sample."""
        return self.data.samples(self.model.sequence_length - 2, self._seed)

    def losses(
        self, model: Predictor, batch: MaskedBatch
    ) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """Negative log-likelihood of the hidden tokens, in nats."""
        return masked_losses(model, batch)

    def windows(self, stream: TokenStream, most: int | None = None) -> MaskedWindows:
        """The windows in which a token stream is scored."""
        length = self.model.sequence_length
        return MaskedWindows(stream, length, self.num_hidden, self.special, most)

    def sums(self, model: Predictor, batch: MaskedWindow, own_B: Tensor) -> Tensor:
        """The loss of the hidden tokens, how many are predicted rightly, and their number."""
        ids_BT, mask_BT, positions_BP, targets_BP, scored_BP = batch
        both_BP2 = model(
            ids_BT, mask_BT, positions_BP=positions_BP, target_ids_BP=targets_BP
        ).logits
        counted_BP = scored_BP & own_B.unsqueeze(1)
        losses_N, right_N = both_BP2[counted_BP].double().unbind(-1)
        return torch.stack([losses_N.sum(), right_N.sum(), counted_BP.sum().double()])

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Loss and accuracy."""
        loss, right, tokens = sums
        return {"loss": loss / tokens, "accuracy": right / tokens}

    def score(self, scoring: Scoring, split: str) -> dict[str, Any]:
        """Loss and accuracy of a split."""
        stream, counts = self.split(split)
        windows = self.windows(stream)
        sums = self.scored(scoring, windows)
        return {
            **self.means(sums),
            "tokens_scored": int(sums[-1]),
            "tokens": counts.tokens,
            "documents": counts.documents,
            "windows": len(windows),
            "sequence_length": self.model.sequence_length,
        }
