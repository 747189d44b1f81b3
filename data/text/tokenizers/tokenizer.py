"""Text to token ids and back: a Hugging Face tokenizer that cannot be made to end a document."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from polyad.data.errors import DataError, nearest
from polyad.data.json_reader import parse_json
from polyad.data.text.manifest import TOKENIZER_FILE, TokenizerFile
from polyad.data.text.tokenizers.content import (
    CHANCE,
    begin_of_text,
    canonical,
    chance_of,
    check_growth,
    check_patterns,
    fingerprint,
    with_begin_of_text,
    without_chance,
)

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
"""Well-known end-of-text tokens, in the order in which they are looked for."""
PARALLELISM = "TOKENIZERS_PARALLELISM"
MOST_IDS = 2**31 - 1
"""A token is stored in 32 bits at most, with a sign."""
CHARACTERS_AT_ONCE = 4 * 1024 * 1024
"""Normalized characters that are given to the library in one call, which bounds memory."""
TRAINED = ("train:VOCAB_SIZE", "words", "words:VOCAB_SIZE", "characters", "wordpiece:VOCAB_SIZE")
"""Specifications of a tokenizer that is made from the train split."""

# Whole and in two pieces, each must give the same ids before long documents are cut there.
_PROBES = (
    ("one\n", "two"),
    ("f(x);\n", "return x"),
    ("12\n", "34"),
    ("é ß\n", "漢字"),
    ("one", " two"),
    ("12;", " zwölf"),
    ("'s", " s"),
    ("漢", " 字"),
    ("\U0001e900\n", "\U0001e901"),  # letters that few vocabularies have: unknown ones may be fused
    ("\U0001e900", " \U0001e901"),
)


class UnknownWordError(DataError):
    """A word that the vocabulary does not have, where it has no entry for unknown ones.

    Args:
        row: Which of the texts has it.
        word: The word.
    """

    def __init__(self, row: int, word: str) -> None:
        super().__init__(
            f"the word {word!r:.80} is not in the vocabulary, which has no <unk> for such words"
        )
        self.row = row


class Tokenizer:
    """Encodes text without special tokens, truncation or padding, whatever its file asks for.

    A text may contain the characters of the end-of-text token: they are encoded as the characters
    they are. Only this package ends a document.

    Args:
        content: The text of a `tokenizer.json`.
        end_of_text: The token that ends each document; None takes a well-known one.

    Attributes:
        file_name: What `save` writes is called so in a prepared folder.
        end_of_text: The token that ends each document.
        end_of_text_id: Its id.
        begin_of_text: The token that begins each document, where the file says that one does.
        begin_of_text_id: Its id.
        vocab_size: All ids are below this.
        fingerprint: SHA-256, hexadecimal, of the canonical `content` and the end-of-text token.
        growth: Characters that the normalizer makes of one, at most.
    """

    file_name: TokenizerFile = TOKENIZER_FILE

    def __init__(self, content: str, end_of_text: str | None = None) -> None:
        self._content = canonical(content)
        self.growth = check_growth(self._content)
        check_patterns(parse_json(self._content, ""))
        self._backend = tokenizers.Tokenizer.from_str(self._content)
        for key in CHANCE:
            if getattr(self._backend.model, key, None) is not None:
                setattr(self._backend.model, key, None)
        self._backend.encode_special_tokens = True  # "<|endoftext|>" in a text is 13 characters
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.end_of_text = choose_end_of_text(vocabulary, end_of_text)
        self.end_of_text_id = vocabulary[self.end_of_text]
        self.begin_of_text = begin_of_text(self._content)
        self.begin_of_text_id = None
        if self.begin_of_text is not None:
            if self.begin_of_text not in vocabulary:
                raise DataError(f"post_processor: the vocabulary has no {self.begin_of_text!r:.80}")
            self.begin_of_text_id = vocabulary[self.begin_of_text]
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > MOST_IDS:
            raise DataError(f"token id {self.vocab_size - 1}: ids are below {MOST_IDS}")
        self.fingerprint = fingerprint(self._content, self.end_of_text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts, in parallel where the machine has several cores.

        Args:
            texts: Any texts.

        Returns:
            The ids of each, never the end-of-text token's.

        Raises:
            DataError: A text cannot be told from the end of a document in this vocabulary, or has
                a word that is not in it.
        """
        batch: list[list[int]] = []
        try:
            for group in self._groups(texts):
                encodings = self._backend.encode_batch_fast(group, add_special_tokens=False)
                batch.extend(encoding.ids for encoding in encodings)
        except Exception as error:  # bare; a vocabulary of words without one for unknown ones
            raise self._unknown_word(texts) or error from None
        except BaseException as error:  # of the library, as where a pattern takes too long
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"this tokenizer cannot encode a text: {error}") from None
        for row, ids in enumerate(batch):
            if self.end_of_text_id in ids:
                batch[row] = self._encode_forged(texts[row])
        return batch

    def _groups(self, texts: Sequence[str]) -> Iterator[list[str]]:
        group: list[str] = []
        characters = 0
        for text in texts:
            characters += len(text) * self.growth
            if group and characters > CHARACTERS_AT_ONCE:
                yield group
                group, characters = [], len(text) * self.growth
            group.append(text)
        if group:
            yield group

    def _unknown_word(self, texts: Sequence[str]) -> UnknownWordError | None:
        normalizer, splitter = self._backend.normalizer, self._backend.pre_tokenizer
        for row, text in enumerate(texts):
            clean = normalizer.normalize_str(text) if normalizer else text
            words = splitter.pre_tokenize_str(clean) if splitter else [(clean, (0, 0))]
            for word, _ in words:
                if self._backend.token_to_id(word) is None:
                    return UnknownWordError(row, word)
        return None

    def _encode_forged(self, text: str) -> list[int]:
        """Encodes a text that the model itself (unigram, word level) ends: cuts the mark in two."""
        head, tail = self.end_of_text[:1], self.end_of_text[1:]
        pieces = text.split(self.end_of_text)
        cut = [pieces[0]]
        for piece in pieces[1:]:
            cut[-1] += head
            cut.append(tail + piece)
        encodings = self._backend.encode_batch_fast(cut, add_special_tokens=False)
        ids = [token for encoding in encodings for token in encoding.ids]
        if self.end_of_text_id in ids:
            raise DataError(
                f"a text contains what this tokenizer reads as its end-of-text token "
                f"{self.end_of_text!r}; choose another one with --end-of-text TOKEN"
            )
        return ids

    def encode(self, text: str) -> list[int]:
        """Encodes one text.

        Args:
            text: Any text.

        Returns:
            Its ids, never the end-of-text token's.
        """
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids, special tokens included.

        Args:
            ids: Token ids.

        Returns:
            Their text.
        """
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def text_within(self, token: int) -> str:
        """The text that a token stands for within a text.

        Args:
            token: Its id.

        Returns:
            With a blank before it, if it has one, and without a mark that it goes on with a word;
            empty of a special token.
        """
        if self._is_special(token):
            return ""
        return self.decode([*self._before, token]).removeprefix(self.decode(self._before))

    @cached_property
    def _before(self) -> list[int]:
        """A letter: what stands first in a text is decoded otherwise than what follows it."""
        try:
            return self.encode("a")
        except DataError:  # a vocabulary of words without it, and without one for unknown words
            return []

    def _is_special(self, token: int) -> bool:
        return token in self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder().items()
        return frozenset(number for number, each in added if each.special)

    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    def save(self, path: str | Path) -> None:
        """Writes the file that `load` reads back to the same fingerprint.

        Args:
            path: The file.
        """
        Path(path).write_bytes(self.file_bytes())

    def file_bytes(self) -> bytes:
        """Gives all that the file holds which `save` writes."""
        return self._content.encode()

    def chance(self) -> str | None:
        """The settings of the file that would make the encoding of a text random.

        Returns:
            `model.dropout: 0.1`, say, which is switched off here but not for others who read the
            file; None where there is nothing.
        """
        found = chance_of(self._content).items()
        return ", ".join(f"model.{key}: {setting}" for key, setting in found) or None

    def without_chance(self) -> "Tokenizer":
        """Returns this tokenizer with a file that has no `chance`, also for other readers."""
        return type(self)(without_chance(self._content), self.end_of_text)

    @property
    def before(self) -> list[int]:
        """Ids that stand before the text of each document: one, or none."""
        return [] if self.begin_of_text_id is None else [self.begin_of_text_id]

    def with_begin_of_text(self, token: str | None) -> "Tokenizer":
        """Returns this tokenizer with a file that says which token begins each document.

        Args:
            token: The token; None: none does.

        Raises:
            DataError: The vocabulary does not have it.
        """
        if token == self.begin_of_text:
            return self
        number = None if token is None else self.vocabulary().get(token)
        if token is not None and number is None:
            raise DataError(
                f"the vocabulary has no token {token!r}, the bos_token that add_bos_token is about"
            )
        content = with_begin_of_text(self._content, token, number)
        return type(self)(content, self.end_of_text)

    @cached_property
    def unused_ids(self) -> list[int]:
        """Ids below `vocab_size` that no token has."""
        return sorted(set(range(self.vocab_size)) - set(self.vocabulary().values()))

    def encodes_in_pieces(self) -> bool:
        """Tells whether a long text can be encoded in pieces.

        Returns:
            Whether cutting it as `data.pieces.cut_between_words` does leaves its ids as they are.
            With GPT-2's pre-tokenizer and its kin it does; not with one that marks the beginning of
            a text, for which a document is encoded whole.
        """
        try:
            for left, right in _PROBES:
                whole, first, second = self.encode_batch([left + right, left, right])
                if whole != first + second:
                    return False
        except UnknownWordError:
            return False
        return True


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Encodes with every core, or with RAYON_NUM_THREADS threads, within the block.

    TOKENIZERS_PARALLELISM=false is what a process that trains wants, and what `launch/machine.py`
    sets; inherited, it would leave all cores but one idle here.
    """
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = before


def byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """Gives a tokenizer that cuts text as GPT-2 does and knows all bytes."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def choose_end_of_text(vocabulary: Mapping[str, int], wanted: str | None) -> str:
    """Chooses the token that ends each document.

    Args:
        vocabulary: The tokens there are.
        wanted: The one that was asked for; None takes a well-known one.

    Returns:
        The token.

    Raises:
        DataError: The vocabulary does not have it.
    """
    if wanted is not None:
        if wanted not in vocabulary:
            raise DataError(
                f"the vocabulary has no token {wanted!r} to end a document"
                f"{nearest(wanted, vocabulary)}; name one with --end-of-text TOKEN"
            )
        return wanted
    for token in KNOWN_END_OF_TEXT:
        if token in vocabulary:
            return token
    raise DataError(
        f"the vocabulary has none of {', '.join(KNOWN_END_OF_TEXT)} to end a document; name one "
        "with --end-of-text TOKEN"
    )
