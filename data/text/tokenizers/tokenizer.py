"""Text to token ids and back, with a Hugging Face tokenizer that never ends a document itself."""

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from polyad.data.errors import DataError, listed, one_line
from polyad.data.files import parse_json
from polyad.data.text.manifest import TOKENIZER_FILE, TokenizerFile

END_OF_TEXT = "<|endoftext|>"
KNOWN_END_OF_TEXT = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "[SEP]",
)
"""Well-known end-of-text tokens, in order of preference."""
CHANCE = ("dropout", "alpha", "nbest_size")
"""Keys of a model (BPE or unigram) that make the encoding of a text random."""
TRAINED = ("train:VOCAB_SIZE", "words", "words:VOCAB_SIZE")
"""Specifications of tokenizers that are trained on the train split."""


class Tokenizer:
    """Encodes text without special tokens, truncation or padding, whatever its file says.

    A text may contain the characters of special tokens, such as the end of a text; they are encoded
    as ordinary characters, unless the tokenizer is one of `parsing`.

    Args:
        content: The text of a `tokenizer.json`.
        end_of_text: The token that ends each document; None for a well-known one.

    Attributes:
        file: Name of its file in a prepared folder.
        end_of_text: The token that ends each document.
        end_of_text_id: Its id.
        begin_of_text: The token that begins each document, if the file defines one.
        begin_of_text_id: Its id.
        vocab_size: All ids are below this.
        fingerprint: SHA-256, hexadecimal, of the canonical `content` and the end-of-text token.
    """

    file: TokenizerFile = TOKENIZER_FILE
    parses: bool = False
    """Whether special tokens that are written in a text are read as such."""

    def __init__(self, content: str, end_of_text: str | None = None) -> None:
        self._content = canonical(content)
        self._backend = tokenizers.Tokenizer.from_str(self._content)
        self._backend.encode_special_tokens = True  # "<|endoftext|>" in a text is 13 characters
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.end_of_text = choose_end_of_text(vocabulary, end_of_text)
        self.end_of_text_id = vocabulary[self.end_of_text]
        self.begin_of_text_id = self._begins()
        self.begin_of_text = None
        if self.begin_of_text_id is not None:
            self.begin_of_text = self._backend.id_to_token(self.begin_of_text_id)
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = fingerprint(self._content.encode(), self.end_of_text)

    def _begins(self) -> int | None:
        """Returns the id that the file puts before a text; None if there is none, or if there is
        one at the end too: such a template, like BERT's, encloses a sequence."""
        plain, whole = (
            self._backend.encode("a", add_special_tokens=adds).ids for adds in (False, True)
        )
        return whole[0] if whole[1:] == plain and len(whole) > len(plain) else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts, in parallel if the machine has several cores.

        Args:
            texts: Any texts.

        Returns:
            The ids of each text, never that of the end-of-text token if special tokens are text.

        Raises:
            DataError: The vocabulary has no token for a text, or reads the end of a document in it,
                as vocabularies of words and unigrams may.
        """
        try:
            batch = self._encode_batch(texts)
        except Exception as error:  # bare; a word vocabulary without an unknown token
            raise DataError(f"a text cannot be encoded: {one_line(error)}") from None
        if not self.parses and any(self.end_of_text_id in ids for ids in batch):
            raise DataError(
                f"a text contains what this tokenizer reads as its end-of-text token "
                f"{self.end_of_text!r}; choose another one with --end-of-text TOKEN"
            )
        return batch

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        """Encodes one text; see `encode_batch`."""
        return self.encode_batch([text])[0]

    def parsing(self) -> "Tokenizer":
        """Returns this tokenizer, which reads special tokens in a text as such, as chats need."""
        other = copy.copy(self)
        other._backend = tokenizers.Tokenizer.from_str(self._content)
        other.parses = True
        other.__dict__.pop("special_words", None)
        return other

    @cached_property
    def special_words(self) -> re.Pattern[str]:
        """Matches special tokens in a text: all if they are parsed, otherwise those that are read
        as their characters."""
        named = self.vocabulary().items()
        words = [each for each, number in named if number in self._special_ids]
        if not self.parses:  # a vocabulary of words may have one as a word
            words = [each for each in words if len(self._encode_batch([each])[0]) > 1]
        return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")

    def begun(self, ids: Sequence[int]) -> list[int]:
        """Returns the ids of a document's text after the token that begins a document, if the file
        defines one and a chat template has not written it."""
        return [*([] if list(ids[:1]) == self.before else self.before), *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids, including special tokens.

        Args:
            ids: Token ids.

        Returns:
            Their text.
        """
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def text_within(self, token: int) -> str:
        """Returns the text that a token stands for inside a text.

        Args:
            token: Its id.

        Returns:
            The text, with a leading space if it has one, and without a mark for continuing a word;
            empty for a special token.
        """
        if token in self._special_ids:
            return ""
        return self.decode([*self._before, token]).removeprefix(self.decode(self._before))

    @cached_property
    def _before(self) -> list[int]:
        """Ids of a letter: the first token of a text is decoded differently from later ones."""
        return self.encode("a")

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder().items()
        return frozenset(number for number, each in added if each.special)

    def vocabulary(self) -> dict[str, int]:
        """Returns every token and its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    def save(self, path: str | Path) -> None:
        """Writes the file that `load` reads back to the same fingerprint.

        Args:
            path: The file.
        """
        Path(path).write_bytes(self.file_bytes())

    def file_bytes(self) -> bytes:
        """Returns the content of the file that `save` writes."""
        return self._content.encode()

    @property
    def before(self) -> list[int]:
        """The ids before the text of each document: one, or none."""
        return [] if self.begin_of_text_id is None else [self.begin_of_text_id]

    def with_begin_of_text(self, token: str | None) -> "Tokenizer":
        """Returns this tokenizer with another begin-of-text token in its file.

        Args:
            token: The token; None for none.

        Raises:
            DataError: The vocabulary lacks it.
        """
        if token == self.begin_of_text:
            return self
        number = None if token is None else self.vocabulary().get(token)
        if token is not None and number is None:
            raise DataError(
                f"the vocabulary has no token {token!r}, the bos_token that add_bos_token is about"
            )
        backend = tokenizers.Tokenizer.from_str(self._content)
        backend.post_processor = None
        if token is not None:
            backend.post_processor = processors.TemplateProcessing(
                single="begin $A",
                pair="begin $A begin:1 $B:1",
                special_tokens=[{"id": "begin", "ids": [number], "tokens": [token]}],
            )
        return type(self)(backend.to_str(), self.end_of_text)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a generated text: the end-of-text token's, unless a model names its
        own, which are then set here."""
        return frozenset({self.end_of_text_id})

    @cached_property
    def unused_ids(self) -> list[int]:
        """The ids below `vocab_size` that no token has."""
        return sorted(set(range(self.vocab_size)) - set(self.vocabulary().values()))


def canonical(content: str) -> str:
    """Rewrites a `tokenizer.json` in canonical form, without truncation, padding and `CHANCE`.

    Args:
        content: The text.

    Returns:
        The same tokenizer, keys sorted.
    """
    # The library's own serialization may change with its version, which would change the
    # fingerprint of prepared data.
    value = parse_json(content, "")
    if not isinstance(value, dict) or "model" not in value:
        raise DataError("not a tokenizer.json: no key 'model'")
    value["truncation"] = value["padding"] = None
    if isinstance(value["model"], dict):
        value["model"] |= {key: None for key in CHANCE if key in value["model"]}
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def fingerprint(content: bytes, end_of_text: str) -> str:
    """Digests the file of a tokenizer (a `tokenizer.json` in canonical form) and its end of text.

    Returns:
        A SHA-256, hexadecimal.
    """
    return hashlib.sha256(content + f"\0{end_of_text}".encode()).hexdigest()


def byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """Makes a tokenizer that splits text like GPT-2 and knows all bytes."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def choose_end_of_text(vocabulary: Mapping[str, int], wanted: str | None) -> str:
    """Chooses the token that ends each document.

    Args:
        vocabulary: The existing tokens.
        wanted: The requested token; None for a well-known one.

    Returns:
        The token.

    Raises:
        DataError: The vocabulary lacks it.
    """
    names = KNOWN_END_OF_TEXT if wanted is None else (wanted,)
    token = next((name for name in names if name in vocabulary), None)
    if token is None:
        raise DataError(
            f"the vocabulary has no token to end a document, {listed(names)}; name one with "
            "--end-of-text TOKEN"
        )
    return token
