"""Vocabularies of the words of the text, and of its characters."""

from collections import Counter
from collections.abc import Iterator, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from polyad.data.errors import DataError
from polyad.data.json_reader import parse_json
from polyad.data.text.tokenizers.tokenizer import Tokenizer, UnknownWordError

UNKNOWN = "<unk>"


class WordTokenizer(Tokenizer):
    """Encodes the words that `str.split()` gives, each to one id.

    Four times as fast as the library's own encoding of such a vocabulary with two threads, and the
    same ids but where U+001C to U+001F stand, which separate words in Python alone. The end-of-text
    token is no word that a text can have.

    Args:
        content: The text of a `tokenizer.json` for which `is_word_vocabulary` holds.
        end_of_text: The token that ends each document; None takes a well-known one.

    Raises:
        DataError: The token that ends a document is that of unknown words, which texts have.
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
            UnknownWordError: A word is not in the vocabulary, and neither is one for such words.
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
        """Returns True: texts are cut at white space, where no word reaches across."""
        return True


def is_word_vocabulary(content: str) -> bool:
    """Tells whether a `tokenizer.json` looks up words that white space separates and nothing else.

    Args:
        content: The text of the file.

    Returns:
        Whether `WordTokenizer` encodes as it does.
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
    """Collects the words of texts; memory holds each different one.

    Args:
        texts: The texts, read once; none begins or ends inside a word.
        vocab_size: Most entries, `<unk>` and the end-of-text token among them; None takes every
            word.
        end_of_text: The token that ends each document.

    Returns:
        The vocabulary: `<unk>`, the end-of-text token, and words from the most to the least
        frequent, equally frequent ones in the order of their code points.

    Raises:
        DataError: There is no word, or `<unk>` was asked to end documents.
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
        raise DataError("words: the text of the train split has no word to make a vocabulary of")
    words = sorted(counts, key=lambda word: (-counts[word], word))
    entries = [*special, *words][:vocab_size]
    vocabulary = {word: number for number, word in enumerate(entries)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return WordTokenizer(backend.to_str(), end_of_text)


def train_characters(texts: Iterator[str], end_of_text: str) -> Tokenizer:
    """Collects the characters of texts: each code point is a token.

    Args:
        texts: The texts, read once.
        end_of_text: The token that ends each document.

    Returns:
        The vocabulary: `<unk>` for characters that these texts do not have, the end-of-text token,
        and the characters in the order of their code points.

    Raises:
        DataError: There is no character, or one was asked to end documents.
    """
    if len(end_of_text) < 2 or end_of_text == UNKNOWN:
        raise DataError(
            f"{end_of_text!r} cannot end a document of characters; choose a token of several "
            f"characters other than {UNKNOWN} with --end-of-text TOKEN"
        )
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise DataError("characters: the text of the train split has none")
    special = (UNKNOWN, end_of_text)
    vocabulary = {token: number for number, token in enumerate([*special, *sorted(characters)])}
    # BPE without merges takes a text apart into its characters, and leaves white space as it is.
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Tokenizer(backend.to_str(), end_of_text)
