"""Trains a tokenizer on text."""

import re
from collections import Counter
from collections.abc import Callable, Iterator

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, trainers

from polyad.data.errors import DataError
from polyad.data.text.tokenizers.tokenizer import END_OF_TEXT, Tokenizer, byte_level

UNKNOWN = "<unk>"
"""The entry for words that a vocabulary of words lacks."""
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

    Args:
        texts: The texts, read once.
        vocab_size: Entries, at least 257: those of all bytes and the end-of-text token.
        end_of_text: The token that ends each document.
    """
    backend = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_without_long_words(texts), trainer=trainer)
    return Tokenizer(backend.to_str(), end_of_text)


def train_words(texts: Iterator[str], vocab_size: int | None, end_of_text: str) -> Tokenizer:
    """Collects the words of texts; each distinct word is kept in memory.

    Args:
        texts: The texts, read once; none begins or ends inside a word.
        vocab_size: Maximum number of entries, including `<unk>` and the end-of-text token; None for
            no limit.
        end_of_text: The token that ends each document.

    Returns:
        The vocabulary: `<unk>`, the end-of-text token, and words by descending frequency, ties in
            the order of their code points.

    Raises:
        DataError: There are no words, or `<unk>` is the end-of-text token.
    """
    if end_of_text == UNKNOWN or not end_of_text:
        raise DataError(f"{end_of_text!r} cannot end a document of words; choose another token")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    special = (UNKNOWN, end_of_text)
    for token in special:
        counts.pop(token, None)
    if not counts:
        raise DataError(
            "words: the text of the train split has no words to build a vocabulary from"
        )
    words = sorted(counts, key=lambda word: (-counts[word], word))
    entries = [*special, *words][:vocab_size]
    vocabulary = {word: number for number, word in enumerate(entries)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Tokenizer(backend.to_str(), end_of_text)


SIZES = {"train": 257, "words": 3}
"""The smallest size of a vocabulary of bytes and the end of text; of a word, `<unk>` and it."""


def trainer_of(spec: str) -> Callable[[Iterator[str], str], Tokenizer] | None:
    """Reads the specification of a tokenizer that is trained on the train split.

    Args:
        spec: `train:VOCAB_SIZE`, `words` or `words:VOCAB_SIZE`; or what `load_tokenizer` reads.

    Returns:
        Trains the tokenizer, from texts and the end-of-text token; None for a path or a name on the
        hub.

    Raises:
        DataError: The part after the colon is not a valid size.
    """
    name, colon, digits = spec.partition(":")
    if spec == "words":
        return lambda texts, end_of_text: train_words(texts, None, end_of_text)
    if name not in SIZES or (spec != "train" and not colon):
        return None
    size = int(digits) if digits.isdecimal() and len(digits) < 20 else -1
    if not SIZES[name] <= size <= LARGEST_VOCABULARY:
        raise DataError(
            f"tokenizer {spec!r:.60}: VOCAB_SIZE in {name}:VOCAB_SIZE is a whole number of at "
            f"least {SIZES[name]} and at most {LARGEST_VOCABULARY:,}"
        )
    train = train_words if name == "words" else train_tokenizer
    return lambda texts, end_of_text: train(texts, size, end_of_text)
