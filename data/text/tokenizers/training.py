"""Loads the tokenizer that a user names, or trains it on the text."""

import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from tokenizers import models, pre_tokenizers, trainers

from polyad.data.errors import DataError
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.tokenizer import END_OF_TEXT, Tokenizer, byte_level

SMALLEST_VOCABULARY = 257
"""256 bytes and the end-of-text token."""
LARGEST_VOCABULARY = 10_000_000
"""Ten times the largest in use; the library aborts the process if memory runs out."""
_LONG_WORD = re.compile(r"(\S{256}(?=\S)|\s{256}(?=\s))")


def _without_long_words(texts: Iterator[str]) -> Iterator[str]:
    """Cuts runs of letters or white space longer than any real word: base64, blank pages.

    Training time is quadratic in the length of a word; merges are never that long.
    """
    for text in texts:
        if _LONG_WORD.search(text) is None:
            yield text
        else:
            yield from (piece for piece in _LONG_WORD.split(text) if piece)


def train_tokenizer(
    texts: Iterator[str], vocab_size: int, end_of_text: str = END_OF_TEXT
) -> Tokenizer:
    """Trains a byte-level BPE with GPT-2's pre-tokenizer; the same texts give the same tokenizer.

    Returns:
        The tokenizer.

    Raises:
        DataError: `vocab_size` is too small for the bytes, or too large for memory.
    """
    if not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        raise DataError(
            f"train:{vocab_size}: a vocabulary has at least {SMALLEST_VOCABULARY} entries "
            f"(256 bytes and the end-of-text token) and at most {LARGEST_VOCABULARY:,}"
        )
    backend = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_without_long_words(texts), trainer=trainer)
    return Tokenizer(backend.to_str(), end_of_text)


Kind: TypeAlias = Literal["bytes", "words"]


class Training(NamedTuple):
    """A tokenizer to train on text.

    Attributes:
        kind: Byte-level BPE, or all words separated by white space.
        vocab_size: Requested number of entries; None for no limit (only for words).
    """

    kind: Kind
    vocab_size: int | None


_SIZED: dict[str, tuple[Kind, int, str]] = {
    "train": ("bytes", SMALLEST_VOCABULARY, "256 bytes and the end-of-text token"),
    "words": ("words", 3, "a word, <unk> and the end-of-text token"),
}
"""By the name before the colon: the kind, the smallest size, and what that has room for."""


def training_wanted(spec: str) -> Training | None:
    """Reads a tokenizer's specification.

    Returns:
        The tokenizer to train on the train split, or None for a path or a name on the hub.

    Raises:
        DataError: The part after the colon is not a valid size.
    """
    name, colon, digits = spec.partition(":")
    if spec == "words":
        return Training("words", None)
    if spec == "train":
        raise DataError("tokenizer 'train': its size is missing; write train:VOCAB_SIZE")
    if not colon or name not in _SIZED:
        return None
    kind, least, what = _SIZED[name]
    size = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else -1
    if not least <= size <= LARGEST_VOCABULARY:
        raise DataError(
            f"tokenizer {spec!r:.60}: VOCAB_SIZE in {name}:VOCAB_SIZE is a whole number of at "
            f"least {least} ({what}) and at most {LARGEST_VOCABULARY:,}"
        )
    return Training(kind, size)


def resolve_tokenizer(
    spec: str,
    *,
    end_of_text: str | None = None,
    training_texts: Callable[[], Iterator[str]] | None = None,
) -> Tokenizer:
    """Loads or trains the tokenizer that the user named.

    Args:
        spec: `train:VOCAB_SIZE`, `words` or `words:VOCAB_SIZE`; or what `load_tokenizer` reads.
        end_of_text: The token that ends each document; None for a well-known one.
        training_texts: Returns the texts to train on; called only if training is needed.

    Returns:
        The tokenizer.

    Raises:
        DataError: There is no such tokenizer, or nothing to train it on.
    """
    wanted = training_wanted(spec)
    if wanted is None:
        return load_tokenizer(spec, end_of_text)
    if training_texts is None:
        raise DataError(f"tokenizer {spec!r}: no text to train on here; name a tokenizer.json")
    if wanted.kind == "words":
        from polyad.data.text.tokenizers.vocabularies import train_words

        return train_words(training_texts(), wanted.vocab_size, end_of_text or END_OF_TEXT)
    assert wanted.vocab_size is not None
    return train_tokenizer(training_texts(), wanted.vocab_size, end_of_text or END_OF_TEXT)
