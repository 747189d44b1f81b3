"""Language modelling of prepared text: predicts the next token, or hidden ones from both sides.

Shapes: B samples of a micro-batch, T tokens of a sample, P hidden ones, V vocabulary.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyad.data.config import DataConfig, MaskedTextConfig
from polyad.data.text.dataset import TokenStream
from polyad.data.text.manifest import SplitInfo
from polyad.data.text.masking import (
    MaskedBatch,
    MaskedSamples,
    MaskedWindow,
    MaskedWindows,
    SpecialTokens,
)
from polyad.data.text.samples import EvaluationWindows, MixedSamples, TrainingData, WindowBatch
from polyad.model.bert import BertConfig, MaskedLanguageHeadConfig
from polyad.model.decoder import DecoderSettings
from polyad.model.output import RoutingStats
from polyad.model.settings import ModelSettings
from polyad.parallel.weights import Weights
from polyad.train.errors import ConfigError
from polyad.train.tasks.distillation import BlockTeacher, Teacher
from polyad.train.tasks.task import Predictor, Score, Scoring, Sections
from polyad.train.tasks.text import TextTask, perplexities, perplexity, with_vocabulary


class TextBatch(NamedTuple):
    """A micro-batch of text: each position predicts the next token."""

    input_ids_BT: Tensor
    target_ids_BT: Tensor

    @classmethod
    def of(cls, tokens_BT1: Tensor) -> "TextBatch":
        """Makes a batch of samples [B, T + 1], or of a single one [T + 1]."""
        return cls(tokens_BT1[..., :-1].contiguous(), tokens_BT1[..., 1:].contiguous())


def text_losses(
    model: Predictor, batch: TextBatch, teacher: Teacher | BlockTeacher | None = None
) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """Returns the loss in nats and the layers' routing statistics. The loss is the mean over
    tokens, with a teacher the loss of each token, with a block teacher the loss of its blocks."""
    if isinstance(teacher, BlockTeacher):
        return teacher.losses(model, batch.input_ids_BT)
    if teacher is None:
        loss, routing = model(batch.input_ids_BT, target_ids_BT=batch.target_ids_BT)
        return loss, routing
    logits_BTV, routing = model(batch.input_ids_BT)
    losses_BT = model.cross_entropy(logits_BTV, batch.target_ids_BT)
    return teacher.mix_in(losses_BT, logits_BTV.float(), batch.input_ids_BT), routing


@dataclass(eq=False)
class TextSamples(Dataset[TextBatch]):
    """Training samples as inputs and targets, each [T]."""

    tokens: MixedSamples

    def __getitem__(self, sample: int) -> TextBatch:
        """The sample with this global number."""
        return TextBatch.of(self.tokens[sample])


class LanguageModelling(TextTask[TextBatch]):
    """Predicts the next token, on one prepared folder or a mixture of several.

    Args:
        data: The prepared folders to train on.
        sections: Sections of the configuration.
    """

    data_settings = DataConfig
    attack = "word-swap"
    scores = (
        Score("loss", "loss", 4, "nats per token"),
        Score("perplexity", "perplexity", 3, "per token"),
        Score("bits_per_byte", "bits per byte", 4),
    )
    loss_unit = "nats per token"
    model: DecoderSettings
    teacher: Teacher | BlockTeacher | None = None
    """The teacher of the logits or, in place of the loss on the text, of the replaced blocks; None:
    the task learns from the text alone."""

    def __init__(self, data: TrainingData, sections: Sections) -> None:
        super().__init__(data, sections)
        model = sections.model
        if not isinstance(model, DecoderSettings) or model.head is not None:
            raise ConfigError(
                f"data.kind: text is not allowed with model.kind: {model.kind}{_head_of(model)}, "
                "which does not predict the next token; allowed: gpt2 and decoder without a head"
            )
        self._attacked: dict[str, tuple[TokenStream, SplitInfo]] = {}
        end = data.tokenizer.end_of_text_id
        self.model = with_vocabulary(model, data.tokenizer.vocab_size, self.place)
        if model.reads_documents():
            if model.end_of_text_id not in (None, end):
                raise ConfigError(
                    f"model.end_of_text_id: {model.end_of_text_id} is not the token that ends "
                    f"documents in {self.place}, {end}; set it to null to use that one"
                )
            self.model = self.model.model_copy(update={"end_of_text_id": end})

    @functools.cached_property
    def samples(self) -> TextSamples:
        """Samples of T tokens, each with its next token."""
        return TextSamples(self.tokens)

    def losses(self, model: Predictor, batch: TextBatch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """Negative log-likelihood of each token in nats, with the distillation loss added if there
        is a teacher; with a block teacher the loss of its blocks."""
        return text_losses(model, batch, self.teacher)

    def sequences_of_sample(self) -> tuple[int, int | None] | None:
        """One whole sequence; None where the loss is that of single blocks."""
        return None if isinstance(self.teacher, BlockTeacher) else (1, None)

    def sums(self, model: Predictor, batch: WindowBatch, own_B: Tensor) -> Tensor:
        """The negative log-likelihood of the scored tokens, and their number."""
        losses_BT = model(batch.input_BT, target_ids_BT=batch.target_BT).logits.double()
        scored_BT = batch.scored_BT & own_B.unsqueeze(1)
        # Select, do not multiply by a mask: the loss of a padded position may not be finite.
        return torch.stack([losses_BT[scored_BT].sum(), scored_BT.sum().double()])

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """The loss in nats per token."""
        return {"loss": sums[0] / sums[1]}

    def validate(self, scoring: Scoring) -> dict[str, float]:
        """Loss and perplexity of the validation split; for a mixture also of each source."""
        losses = super().validate(scoring)
        return losses | {
            name.replace("validation_loss", "validation_perplexity", 1): perplexity(loss)
            for name, loss in losses.items()
        }

    def windows(
        self, stream: TokenStream, most: int | None = None, stride: int | None = None
    ) -> EvaluationWindows:
        """The windows in which a token stream is scored, by default `evaluation.stride` apart."""
        length, about = self.model.sequence_length, self.data.tokenizer
        stride = stride or self.evaluation.stride or length
        begin, end = about.begin_of_text_id, about.end_of_text_id
        return EvaluationWindows(stream, length, stride, end, begin, max_windows=most)

    def split(self, name: str) -> tuple[TokenStream, SplitInfo]:
        """The tokens of a split of the first folder, and its counts of words and bytes."""
        return self._attacked.get(name) or super().split(name)

    def attacked(self, name: str, stream: TokenStream, counts: SplitInfo) -> "LanguageModelling":
        """A copy of this task with other text in one split, given by its tokens and counts."""
        task = copy.copy(self)
        task._attacked = {name: (stream, counts)}
        return task

    def score(self, scoring: Scoring, split: str) -> dict[str, Any]:
        """Perplexities of a split; see `polyad.train.tasks.text.perplexities`."""
        stream, counts = self.split(split)
        windows = self.windows(stream)
        nats, tokens = self.scored(scoring, windows)
        return {
            **perplexities(nats, tokens=int(tokens), words=counts.words, bytes_=counts.bytes),
            "tokens_scored": int(tokens),
            "words": counts.words,
            "bytes": counts.bytes,
            "documents": counts.documents,
            "sequence_length": windows.sequence_length,
            "stride": windows.stride,
        }

    def rows(self, scores: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Loss, perplexities, and how the text was read."""
        loss, perplexity, bits, scored = super().rows(scores)
        return [
            loss,
            perplexity,
            ("word perplexity", f"{scores['word_perplexity']:,.3f} (separated by white space)"),
            bits,
            (scored[0], f"{scored[1]}, including end-of-text"),
            ("window", f"{scores['sequence_length']} tokens, stride {scores['stride']}"),
        ]


def language_model(weights: Weights) -> DecoderSettings:
    """Returns the configuration of a language model's weights.

    Raises:
        ConfigError: They are not a language model's.
    """
    config = weights.model_config()
    if not isinstance(config, DecoderSettings) or config.head is not None:
        raise ConfigError(
            f"{weights.folder}: model.kind: {config.kind}{_head_of(config)} is not a language "
            "model, which are gpt2 and decoder without a head"
        )
    return config


def _head_of(model: ModelSettings) -> str:
    head = getattr(model, "head", None)
    return "" if head is None else f" with model.head.kind: {head.kind}"


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
    marks = 2
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

    losses = staticmethod(masked_losses)

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
