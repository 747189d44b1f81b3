"""Attacked text: the documents of a split with words replaced, then encoded again."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from polyad.data.errors import DataError, check_attack
from polyad.data.text.dataset import TokenStream
from polyad.data.text.manifest import SplitInfo
from polyad.data.text.sources import Document
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.data.text.writer import encode_documents

REPLACEMENT = "AAA"
"""The word of TextAttack's word swap, which the papers use."""
_WORD = re.compile(r"\S+")


class Swapped(NamedTuple):
    """A text after the attack."""

    text: str
    words: int
    """Words of the text."""
    replaced: int
    """How many of its words were replaced."""


@dataclass(frozen=True)
class WordSwap:
    """Replaces each word by "AAA" with a probability.

    A word is a run of characters between white space, punctuation included; white space is kept.
    Which words of a document are replaced depends only on the seed and the document's number; a
    higher rate replaces the same words and more.

    Raises:
        DataError: A number is out of its range.
    """

    rate: float
    """The probability, from 0 to 1."""
    seed: int = 0
    """Not negative."""

    def __post_init__(self) -> None:
        check_attack(self.rate, self.seed)

    def __call__(self, text: str, document: int) -> Swapped:
        """Attacks a document."""
        draw = random.Random(f"{self.seed}/{document}").random
        words = replaced = 0

        def replace(match: re.Match[str]) -> str:
            nonlocal words, replaced
            words += 1
            if draw() >= self.rate:
                return match[0]
            replaced += 1
            return REPLACEMENT

        return Swapped(_WORD.sub(replace, text), words, replaced)


class AttackedSplit(NamedTuple):
    """A split after the attack."""

    stream: TokenStream
    info: SplitInfo
    """Counts of the attacked text: its tokens, words and bytes."""
    words: int
    """Words of the split."""
    replaced: int
    """How many of its words were replaced."""


def attacked_split(stream: TokenStream, tokenizer: Tokenizer, attack: WordSwap) -> AttackedSplit:
    """Decodes the documents of a split, attacks each, and encodes them again, in memory.

    Args:
        stream: The split.
        tokenizer: The tokenizer that made it.
        attack: The attack on each text.

    Raises:
        DataError: The tokenizer has no token for a word that the attack inserts.
    """
    counts = Counter(words=0, replaced=0, bytes=0)

    def swapped() -> Iterator[Document]:
        for number in range(stream.num_documents):
            *ids, _ = stream.read_document(number).tolist()
            begins = bool(tokenizer.before) and ids[:1] == tokenizer.before
            text, words, replaced = attack(tokenizer.decode(ids[1:] if begins else ids), number)
            counts.update(words=words, replaced=replaced, bytes=len(text.encode()))
            yield Document(f"document {number}", text)

    try:
        documents = [
            np.array([*tokenizer.before, *ids, tokenizer.end_of_text_id])
            for ids in encode_documents(tokenizer, swapped())
        ]
    except DataError as error:
        raise DataError(f"{stream.prefix}.bin: cannot be attacked: {error}") from None
    attacked = TokenStream.of(stream.prefix, documents, tokenizer.vocab_size)
    info = SplitInfo(
        documents=len(documents),
        tokens=attacked.num_tokens,
        words=counts["words"],
        bytes=counts["bytes"],
    )
    return AttackedSplit(attacked, info, counts["words"], counts["replaced"])
