"""Vocabularies of the words of a text, and BERT's.

WordPiece, from BERT, has words, and pieces that continue a word and begin with ##. Source: Devlin
et al. 2019 and the released code, whose `vocab.txt` has one token per line.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from polyad.data.errors import DataError
from polyad.data.json_reader import parse_json, read_json
from polyad.data.text.tokenizers.tokenizer import Tokenizer, UnknownWordError

UNKNOWN = "<unk>"


class WordTokenizer(Tokenizer):
    """Encodes the words that `str.split()` returns, each as one id.

    It is four times as fast as the library with such a vocabulary and two threads, and gives the
    same ids, except that U+001C to U+001F separate words only in Python. The end-of-text token
    cannot occur as a word of a text.

    Args:
        content: The text of a `tokenizer.json` for which `is_word_vocabulary` holds.
        end_of_text: The token that ends each document; None for a well-known one.

    Raises:
        DataError: The end-of-text token is the unknown token, which occurs in texts.
    """

    def __init__(self, content: str, end_of_text: str | None = None) -> None:
        super().__init__(content, end_of_text)
        model = parse_json(content, "")["model"]
        self._words: dict[str, int] = dict(model["vocab"])
        self._unknown = self._words.get(model["unk_token"])
        if self._unknown == self.end_of_text_id:
            raise DataError(
                f"{self.end_of_text!r} stands for unknown words and cannot end a document; choose "
                "another token with --end-of-text TOKEN"
            )
        self._words.pop(self.end_of_text, None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts; see `Tokenizer.encode_batch`.

        Args:
            texts: Any texts.

        Returns:
            The id of each word of each text.

        Raises:
            UnknownWordError: A word is not in the vocabulary, which has no unknown token.
        """
        if self._unknown is not None:
            find, unknown = self._words.get, self._unknown
            return [[find(word, unknown) for word in text.split()] for text in texts]
        batch = []
        for row, text in enumerate(texts):
            try:
                batch.append([self._words[word] for word in text.split()])
            except KeyError as error:
                raise UnknownWordError(row, error.args[0]) from None
        return batch

    def encodes_in_pieces(self) -> bool:
        """Returns True: texts are cut at white space, which no word spans."""
        return True


def is_word_vocabulary(content: str) -> bool:
    """Returns whether a `tokenizer.json` only looks up words separated by white space.

    Returns:
        Whether `WordTokenizer` encodes like it.
    """
    value = parse_json(content, "")
    model = value.get("model") if isinstance(value, dict) else None
    return (
        isinstance(model, dict)
        and model.get("type") == "WordLevel"
        and isinstance(model.get("vocab"), dict)
        and value.get("normalizer") is None
        and (value.get("pre_tokenizer") or {}).get("type") == "WhitespaceSplit"
        and all(token.get("special") for token in value.get("added_tokens") or ())
    )


def train_words(texts: Iterator[str], vocab_size: int | None, end_of_text: str) -> WordTokenizer:
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
    return WordTokenizer(backend.to_str(), end_of_text)


VOCABULARY_FILE = "vocab.txt"
ABOUT_FILE = "tokenizer_config.json"
UNKNOWN_PIECE = "[UNK]"
SPECIAL = ("[PAD]", UNKNOWN_PIECE, "[CLS]", "[SEP]", "[MASK]")
"""The special tokens."""
PREFIX = "##"


def wordpiece(
    vocabulary: dict[str, int],
    lowercase: bool,
    *,
    strip_accents: bool | None = None,
    split_chinese: bool = True,
) -> tokenizers.Tokenizer:
    """Makes a tokenizer that splits text like BERT.

    Args:
        vocabulary: Tokens and their ids.
        lowercase: Whether text is lower-cased first.
        strip_accents: Whether accents are removed; None: as `lowercase`.
        split_chinese: Whether each Chinese character is a word of its own.
    """
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN_PIECE))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=split_chinese
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=PREFIX)
    known = [AddedToken(token, special=True) for token in SPECIAL if token in vocabulary]
    backend.add_special_tokens(known)
    if {
        "[CLS]",
        "[SEP]",
    } <= vocabulary.keys():  # for other readers of the file; it is not used here
        marks = [(token, vocabulary[token]) for token in ("[SEP]", "[CLS]")]
        backend.post_processor = processors.BertProcessing(*marks)
    return backend


def read_vocabulary(file: Path, end_of_text: str | None = None) -> Tokenizer:
    """Reads a `vocab.txt`.

    Args:
        file: A file with one token per line; a `tokenizer_config.json` beside it says whether text
            is lower-cased. Without one it is, if no token has an upper-case letter.
        end_of_text: The token that ends each document; None for a well-known one, [SEP].

    Raises:
        DataError: It is not such a vocabulary.
    """
    try:
        # Not splitlines: Chinese vocabularies contain a token that is another line separator.
        tokens = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}") from None
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if UNKNOWN_PIECE not in vocabulary:
        raise DataError(f"not the vocab.txt of a BERT: it has no token {UNKNOWN_PIECE}")
    if len(vocabulary) < len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise DataError(f"not the vocab.txt of a BERT: {twice!r} appears twice")
    about = _about(file.parent / ABOUT_FILE)
    lowercase = about.get("do_lower_case")
    if lowercase is None:
        ordinary = (token for token in vocabulary if token not in SPECIAL)
        lowercase = not any(token != token.lower() for token in ordinary)
    backend = wordpiece(
        vocabulary,
        lowercase,
        strip_accents=about.get("strip_accents"),
        split_chinese=about.get("tokenize_chinese_chars", True),
    )
    return Tokenizer(backend.to_str(), end_of_text)


def _about(file: Path) -> dict[str, bool]:
    """Returns the switches in a `tokenizer_config.json`; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        tree = dict(read_json(file))
    except TypeError:
        raise DataError(f"{file}: is not a JSON object") from None
    return {key: value for key, value in tree.items() if isinstance(value, bool)}
