"""Masked language modelling: predicts hidden tokens of prepared text from both sides.

Shapes: B samples of a micro-batch, T tokens of a sample, P hidden ones.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from polyad.data.config import MaskedTextConfig
from polyad.data.errors import DataError
from polyad.data.text.dataset import TokenStream
from polyad.data.text.masking import (
    MaskedBatch,
    MaskedSamples,
    MaskedWindows,
    SpecialTokens,
)
from polyad.data.text.samples import MixedSamples, TrainingData
from polyad.model.bert import BertConfig, MaskedLanguageHeadConfig
from polyad.model.output import RoutingStats
from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.tasks.task import Predictor, Score, Scores, Sections, Share, dealt_out
from polyad.train.tasks.text import TextTask, with_vocabulary


def masked_losses(model: Predictor, batch: MaskedBatch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """Returns the mean loss of the hidden tokens, and the layers' routing statistics.

    Every sample has equally many hidden tokens, so the mean over processes is the mean of means.
    """
    loss, routing = model(
        batch.input_ids_BT, positions_BP=batch.positions_BP, target_ids_BP=batch.target_ids_BP
    )
    return loss, routing


class HiddenScore(NamedTuple):
    """How well hidden tokens are predicted."""

    loss: float
    accuracy: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class MaskedScores(Scores):
    """Scores of a model that predicts the hidden tokens of a split."""

    loss: float
    accuracy: float
    tokens_scored: int
    tokens: int
    """All tokens of the split."""
    documents: int
    windows: int
    sequence_length: int


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
        if not isinstance(model, BertConfig):
            raise ConfigError(
                f"data.kind: masked_text is not allowed with model.kind: {model.kind}, which does "
                "not see both sides of a masked token; allowed with: bert"
            )
        if not isinstance(model.head, MaskedLanguageHeadConfig):
            raise ConfigError(
                f"data.kind: masked_text is not allowed with model.head.kind: {model.head.kind}, "
                "which does not predict tokens; allowed with: language"
            )
        self.model = with_vocabulary(model, data.tokenizer.vocab_size, self.place)
        self.special = SpecialTokens.of(data.parts[0].data.tokenizer(), self.place)
        self.num_hidden = model.head.num_masked(model.sequence_length)

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

    def validate(
        self, model: Predictor, *, batch_size: int, world: comm.World, report: Share
    ) -> dict[str, float]:
        """Loss and accuracy of the validation split; for a mixture also of each source."""

        def score(stream: TokenStream) -> dict[str, float]:
            windows = self.windows(stream, self.evaluation.max_windows)
            found = self._scored(model, windows, batch_size=batch_size, world=world, report=report)
            return {"loss": found.loss, "accuracy": found.accuracy}

        return self.validate_sources(["loss", "accuracy"], score)

    def score(
        self,
        model: Predictor,
        split: str,
        *,
        batch_size: int,
        world: comm.World,
        report: Share | None = None,
    ) -> MaskedScores:
        """Loss and accuracy of a split."""
        stream, counts = self.split(split)
        windows = self.windows(stream)
        found = self._scored(model, windows, batch_size=batch_size, world=world, report=report)
        return MaskedScores(
            loss=found.loss,
            accuracy=found.accuracy,
            tokens_scored=found.tokens,
            tokens=counts.tokens,
            documents=counts.documents,
            windows=len(windows),
            sequence_length=self.model.sequence_length,
        )

    @torch.no_grad()
    def _scored(
        self,
        model: Predictor,
        windows: MaskedWindows,
        *,
        batch_size: int,
        world: comm.World,
        report: Share | None,
    ) -> HiddenScore:
        """Mean loss and accuracy of the hidden tokens over all processes."""
        total_3 = torch.zeros(3, dtype=torch.float64, device=world.device)
        for batch, own_B in dealt_out(windows, len(windows), batch_size, world, report=report):
            ids_BT, mask_BT, positions_BP, targets_BP, scored_BP = (
                each.to(world.device) for each in batch
            )
            both_BP2 = model(
                ids_BT, mask_BT, positions_BP=positions_BP, target_ids_BP=targets_BP
            ).logits
            counted_BP = scored_BP & own_B.to(world.device).unsqueeze(1)
            losses_N, right_N = both_BP2[counted_BP].double().unbind(-1)
            total_3 += torch.stack([losses_N.sum(), right_N.sum(), counted_BP.sum().double()])
        loss, right, tokens = comm.sum_over_samples(total_3, world).tolist()
        if not tokens:
            raise DataError(f"{self.place}: the split has no text, only special tokens")
        return HiddenScore(loss / tokens, right / tokens, int(tokens))
