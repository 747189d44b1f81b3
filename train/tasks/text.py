"""Base of all tasks on prepared text: folders, their tokenizer, and the scoring of splits.

Every token of a split is scored once, including end-of-text tokens, each with at least
sequence_length - stride tokens of context where the split has them. One end-of-text token goes
before the first token, as context only.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor

from polyad.data.config import DataConfig
from polyad.data.errors import DataError
from polyad.data.text.dataset import TokenStream
from polyad.data.text.manifest import SplitInfo, SplitName, TokenizerInfo
from polyad.data.text.samples import MixedSamples, TrainingData
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.model.bert import BertConfig
from polyad.model.decoder import DecoderSettings
from polyad.parallel import comm
from polyad.parallel.weights import Weights
from polyad.train.errors import ConfigError
from polyad.train.tasks.task import (
    Batch,
    CheckpointExtras,
    EvaluationConfig,
    Predictor,
    Scoring,
    Sections,
    Task,
    Unit,
)
from polyad.train.tasks.vocabulary import check_tokenizer

TextModel = TypeVar("TextModel", bound=DecoderSettings | BertConfig)


class TextTask(Task[Batch]):
    """A task on one prepared folder or a mixture of several.

    Args:
        data: The prepared folders to train on.
        sections: Sections of the configuration.
    """

    unit: ClassVar[Unit] = Unit("token", "tok")
    marks: ClassVar[int] = 0
    """Number of special tokens that a model reads around the text of a sample."""

    def __init__(self, data: TrainingData, sections: Sections) -> None:
        settings = sections.data
        assert isinstance(settings, DataConfig)
        self.data, self.settings = data, settings
        self.evaluation: EvaluationConfig = sections.evaluation
        self._seed = sections.seed

    @classmethod
    def open(cls, sections: Sections) -> Self:
        """Opens the prepared folders, and checks that each is long enough for a sample."""
        assert isinstance(sections.data, DataConfig)
        task = cls(TrainingData.open(sections.data), sections)
        _ = task.samples
        return task

    @classmethod
    def open_held_out(cls, sections: Sections, weights: Weights) -> Self:
        """Opens the one folder that `data.path` names; it needs the tokenizer of the weights."""
        settings = sections.data
        assert isinstance(settings, DataConfig)
        if settings.mixture is not None:
            folders = ", ".join(source.path for source in settings.mixture)
            raise ConfigError(
                f"data.mixture: choose one folder to evaluate with --data, out of {folders}"
            )
        data = TrainingData.open(settings)
        place = f"{data.key}: {settings.path}"
        check_tokenizer(place, data.parts[0].data, weights, "checkpoint")
        return cls(data, sections)

    @property
    def place(self) -> str:
        """The key that names the data, `data.path` or `data.mixture`, with its folders."""
        return f"{self.data.key}: {self.name}"

    @property
    def name(self) -> str:
        """The folder or folders as written in the configuration."""
        paths = [source.path for source in self.settings.mixture or ()]
        return ", ".join(paths) or str(self.settings.path)

    @property
    def fingerprint(self) -> str:
        """A digest of the prepared folders and their weights in the mixture."""
        return self.data.fingerprint

    @functools.cached_property
    def tokens(self) -> MixedSamples:
        """Samples cut from the text, each with the first token of the next one."""
        return self.data.samples(self.model.units_per_sample() - self.marks, self._seed)

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one epoch of all folders."""
        return self.tokens.samples_per_epoch

    @property
    def notes(self) -> Sequence[str]:
        """Says if the model has many tokens that the data has not."""
        has = self.data.parts[0].data.manifest.tokenizer.vocab_size
        most = getattr(self.model, "vocab_size", None)
        if most is None or has > 0.9 * most:
            return ()
        return (f"the vocabulary of the data has {has:,} tokens, that of the model {most:,}",)

    @property
    def has_validation(self) -> bool:
        """Whether a folder has a validation split."""
        return bool(self.data.validation())

    @abstractmethod
    def windows(self, stream: TokenStream, most: int | None = None) -> Any:
        """The windows in which a token stream is scored, at most `most` of them."""

    @abstractmethod
    def sums(self, model: Predictor, batch: Any, own_B: Tensor) -> Tensor:
        """Sums over the scored tokens of windows: the loss in nats first, their number last.

        Args:
            model: In evaluation mode.
            batch: Windows, on the model's device.
            own_B: Which of them count.

        Returns:
            fp64.
        """

    @abstractmethod
    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """The scores that a validation reports, from the `sums` of a split."""

    @torch.no_grad()
    def scored(self, scoring: Scoring, windows: Any) -> list[float]:
        """Adds the `sums` of a split over all processes, which run equally many forward passes."""
        total = torch.zeros((), dtype=torch.float64, device=scoring.world.device)
        for batch, own_B, _ in scoring.batches(windows):
            total = total + self.sums(scoring.model, batch, own_B)
        sums: list[float] = comm.sum_over_samples(total, scoring.world).tolist()
        if not sums[-1]:
            raise DataError(f"{self.place}: the split has no text, only special tokens")
        return sums

    def validate(self, scoring: Scoring) -> dict[str, float]:
        """Scores the validation split; for a mixture the mean weighted by the shares of its
        sources, and each source."""
        parts, scores = self.data.validation(), {}
        for part in parts:
            windows = self.windows(part.data.split("validation"), self.evaluation.max_windows)
            scores[part.name] = self.means(self.scored(scoring, windows))
        record = {}
        for name in scores[parts[0].name]:
            record[f"validation_{name}"] = sum(
                part.share * scores[part.name][name] for part in parts
            )
            if len(self.data.parts) > 1:
                record |= {f"validation_{name}/{part}": own[name] for part, own in scores.items()}
        return record

    def check_split(self, split: str) -> None:
        """Checks that the split has tokens."""
        self.windows(self.split(split)[0])

    def split(self, name: str) -> tuple[TokenStream, SplitInfo]:
        """The tokens of a split of the first folder, and its counts of words and bytes."""
        data = self.data.parts[0].data
        split = cast(SplitName, name)
        return data.split(split), data.manifest.splits[split]

    def units_of(self, split: str) -> int:
        """The number of tokens in a split."""
        return self.split(split)[1].tokens

    def kept(self) -> CheckpointExtras:
        """The tokenizer's file, and fingerprints of the tokenizer and of the data."""
        tokenizer = self.data.tokenizer
        content = (self.data.parts[0].data.path / tokenizer.file).read_bytes()
        return kept_with_tokenizer(self.fingerprint, tokenizer, content)

    def check_weights(self, weights: Weights, owner: str) -> None:
        """Checks that the weights were trained with these token ids."""
        check_tokenizer(self.place, self.data.parts[0].data, weights, owner)

    def sources(self, samples: Sequence[int]) -> dict[str, list[int]]:
        """Numbers of the documents that the samples are cut from, by name of the data."""
        return self.data.documents(self.tokens, samples)


def with_vocabulary(model: TextModel, vocab_size: int, place: str) -> TextModel:
    """Completes a model's configuration with the vocabulary size of a tokenizer.

    Args:
        model: Its `vocab_size` may be None.
        vocab_size: The tokenizer's vocabulary size.
        place: Names the data in the error.

    Raises:
        ConfigError: The model's vocabulary is smaller.
    """
    in_config = model.vocab_size
    if in_config is not None and in_config < vocab_size:
        raise ConfigError(
            f"model.vocab_size: {in_config} is less than the {vocab_size} tokens of the tokenizer "
            f"of {place}"
        )
    complete = model.model_copy(update={"vocab_size": in_config or vocab_size}).filled()
    return cast(TextModel, complete)  # of the same class


def kept_with_tokenizer(
    fingerprint: str, tokenizer: Tokenizer | TokenizerInfo, content: bytes
) -> CheckpointExtras:
    """Returns what a checkpoint stores for data of tokens.

    Args:
        fingerprint: The data's.
        tokenizer: Its tokenizer.
        content: The tokenizer's file.
    """
    state = {
        "data_fingerprint": fingerprint,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "end_of_text": tokenizer.end_of_text,
    }
    return CheckpointExtras(state, {tokenizer.file: content})


def perplexities(nats: float, *, tokens: int, words: int, bytes_: int) -> dict[str, float]:
    """Computes scores per token, per word and per byte.

    Args:
        nats: summed negative log-likelihood of the tokens of a whole split.
        tokens: their number.
        words: number of words in its text, separated by white space.
        bytes_: number of UTF-8 bytes in its text.

    Returns:
        Loss in nats per token, token and word perplexity, bits per byte. The likelihood of
        end-of-text tokens enters all four; they count as tokens, but not as words or bytes.
    """
    return {
        "loss": nats / tokens,
        "perplexity": perplexity(nats / tokens),
        "word_perplexity": perplexity(nats / words) if words else float("nan"),
        "bits_per_byte": nats / math.log(2) / bytes_ if bytes_ else float("nan"),
    }


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats; infinite where fp64 overflows."""
    return math.exp(loss) if loss < 700 else float("inf")
