"""Masked language modelling: samples to train on, and windows to score with.

A sample is a run of text with [CLS] before it and [SEP] after it, T tokens in all. The number of
chosen tokens is the same for every sample, so that the mean over the chosen tokens of a batch
equals the mean over any equal parts of it. Of the chosen tokens 80% become [MASK], 10% a random
token and 10% stay unchanged (Devlin et al. 2019, section 3.1).

Shapes: T tokens of a sample, P chosen ones, S special tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyad.data.errors import DataError
from polyad.data.text.dataset import TokenStream
from polyad.data.text.samples import MixedSamples
from polyad.data.text.tokenizers.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]
MASKED, RANDOM = 0.8, 0.1
"""Fractions of the chosen tokens that become [MASK], and a random token."""
# The last word of a random stream's seed. Seeds are padded with zeros, so the masks of sample 0
# start like the document order of its epoch, whose seed has three words.
_TRAINING, _SCORING = 0, 1


class SpecialTokens(NamedTuple):
    """The special tokens of a vocabulary."""

    begin: int
    """[CLS]."""
    end: int
    """[SEP]."""
    mask: int
    """[MASK]."""
    padding: int
    """[PAD]."""
    end_of_text: int
    """The separator between documents; often [SEP], too."""
    vocab_size: int

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of all of them."""
        return self[:-1]

    @classmethod
    def of(cls, tokenizer: Tokenizer, place: str) -> "SpecialTokens":
        """Finds the special tokens of a tokenizer.

        Args:
            tokenizer: The tokenizer of the text.
            place: Names the text in the error message.

        Raises:
            DataError: The tokenizer lacks one of them.
        """
        vocabulary = tokenizer.vocabulary()
        names = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
        lacking = [name for name in names if name not in vocabulary]
        if lacking:
            raise DataError(
                f"{place}: its tokenizer has no token {lacking[0]}, which data.kind: masked_text "
                f"needs; prepare the text again with a WordPiece vocabulary, such as the folder of "
                f"a BERT"
            )
        begin, end, mask, padding = (vocabulary[name] for name in names)
        return cls(begin, end, mask, padding, tokenizer.end_of_text_id, tokenizer.vocab_size)


class Hidden(NamedTuple):
    """A sample with some of its tokens hidden."""

    input_ids_T: Ids
    positions_P: Ids
    """Positions of the chosen tokens, ascending."""
    target_ids_P: Ids
    """The original tokens at these positions."""


def hide(
    tokens_T: Ids, count: int, special: SpecialTokens, generator: np.random.Generator
) -> Hidden:
    """Chooses tokens and hides them.

    Args:
        tokens_T: A sample; the marks at both ends are never chosen.
        count: Number of tokens to choose, at most T - 2; ends of documents and other special tokens
            are chosen only if nothing else is left.
        special: The special tokens of the vocabulary.
        generator: The source of randomness.
    """
    rank_T = generator.random(len(tokens_T))
    rank_T[np.isin(tokens_T, special.ids)] += 1
    rank_T[[0, -1]] = 3
    positions_P = np.sort(np.argsort(rank_T, kind="stable")[:count])
    target_ids_P = tokens_T[positions_P]
    use_P = generator.random(count)
    random_P = generator.integers(special.vocab_size, size=count)
    kept_P = np.where(use_P < MASKED + RANDOM, random_P, target_ids_P)
    input_ids_T = tokens_T.copy()
    input_ids_T[positions_P] = np.where(use_P < MASKED, special.mask, kept_P)
    return Hidden(input_ids_T, positions_P, target_ids_P)


def between_marks(text: Ids, special: SpecialTokens) -> Ids:
    """Adds a mark at each end of a run of text."""
    return np.concatenate([[special.begin], text, [special.end]]).astype(np.int64)


class MaskedBatch(NamedTuple):
    """A micro-batch to train on: no padding, and equally many hidden tokens in every sample."""

    input_ids_BT: Tensor
    positions_BP: Tensor
    target_ids_BP: Tensor


@dataclass(eq=False)
class MaskedSamples(Dataset[MaskedBatch]):
    """Training samples; the hidden tokens depend only on seed, epoch and sample."""

    text: MixedSamples
    """Text cut into samples of T - 2 targets, which are the text of a masked sample and one more
    token."""
    count: int
    """P."""
    special: SpecialTokens
    """The special tokens of the vocabulary."""
    seed: int
    """Not negative."""

    def __getitem__(self, sample: int) -> MaskedBatch:
        """Reads a sample by its global number."""
        epoch, number = divmod(sample, self.text.samples_per_epoch)
        words = (self.seed, epoch, number, _TRAINING)
        text = self.text[sample].numpy()[:-1]  # the last token begins the next sample
        hidden = hide(
            between_marks(text, self.special),
            self.count,
            self.special,
            np.random.Generator(np.random.PCG64(words)),
        )
        return MaskedBatch(*map(torch.from_numpy, hidden))


class MaskedWindow(NamedTuple):
    """A window of held-out text, or a batch of them."""

    input_ids_T: Tensor
    mask_T: Tensor
    """False for padding after the text of the last window."""
    positions_P: Tensor
    target_ids_P: Tensor
    scored_P: Tensor
    """Whether a position counts: a window with little text has fewer."""


@dataclass(eq=False)
class MaskedWindows(Dataset[MaskedWindow]):
    """The text of a split, each token once, with the same hidden tokens in every run.

    Raises:
        DataError: The split is empty.
    """

    stream: TokenStream
    """The tokens of a split."""
    sequence_length: int
    """T."""
    count: int
    """P, how many tokens of a full window are hidden."""
    special: SpecialTokens
    """The special tokens of the vocabulary."""
    max_windows: int | None = None
    """Maximum number of windows; None for all."""

    def __post_init__(self) -> None:
        if self.stream.num_tokens == 0:
            raise DataError(f"{self.stream.prefix}.bin: no tokens to evaluate on in this split")

    def __len__(self) -> int:
        """Counts the windows."""
        windows = -(-self.stream.num_tokens // (self.sequence_length - 2))
        return windows if self.max_windows is None else min(windows, self.max_windows)

    @property
    def num_full(self) -> int:
        """Number of windows without padding."""
        return min(len(self), self.stream.num_tokens // (self.sequence_length - 2))

    def text(self, window: int) -> Ids:
        """Returns the tokens of a window between two marks, at most T."""
        first = window * (self.sequence_length - 2)
        last = min(first + self.sequence_length - 2, self.stream.num_tokens)
        return between_marks(self.stream.read(first, last), self.special)

    def __getitem__(self, window: int) -> MaskedWindow:
        """Reads a window."""
        tokens = self.text(window)
        words = int((~np.isin(tokens, self.special.ids)).sum())
        # The same fraction as in a full window.
        share = self.count * len(tokens) / self.sequence_length
        count = min(words, max(1, round(share)))
        generator = np.random.Generator(np.random.PCG64((0, 0, window, _SCORING)))
        hidden = hide(tokens, count, self.special, generator)
        after_T, after_P = self.sequence_length - len(tokens), self.count - count
        fields = (
            np.pad(hidden.input_ids_T, (0, after_T), constant_values=self.special.padding),
            np.arange(self.sequence_length) < len(tokens),
            np.pad(hidden.positions_P, (0, after_P)),
            np.pad(hidden.target_ids_P, (0, after_P), constant_values=self.special.mask),
            np.arange(self.count) < count,
        )
        return MaskedWindow(*map(torch.from_numpy, fields))
