"""Attacked text: the documents of a split with words replaced, then encoded again."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from polyad.data.errors import prefixed
from polyad.data.text.dataset import TokenStream
from polyad.data.text.manifest import SplitInfo
from polyad.data.text.sources import Document
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.data.text.writer import encode_documents

REPLACEMENT = "AAA"
"""The word of TextAttack's word swap, which the papers use."""
_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class WordSwap:
    """Replaces each word by "AAA" with a probability.

    A word is a run of characters between white space, punctuation included; white space is kept.
    Which words of a document are replaced depends only on the seed and the document's number; a
    higher rate replaces the same words and more.
    """

    rate: float
    """The probability, from 0 to 1."""
    seed: int = 0
    """Not negative."""

    def __call__(self, text: str, document: int) -> tuple[str, int]:
        """Attacks a document; returns its text, and how many words were replaced."""
        draw = random.Random(f"{self.seed}/{document}").random
        replaced = 0

        def replace(match: re.Match[str]) -> str:
            nonlocal replaced
            if draw() >= self.rate:
                return match[0]
            replaced += 1
            return REPLACEMENT

        return _WORD.sub(replace, text), replaced


def attacked_split(
    stream: TokenStream, tokenizer: Tokenizer, attack: WordSwap
) -> tuple[TokenStream, SplitInfo, int]:
    """Decodes the documents of a split, attacks each, and encodes them again, in memory.

    Args:
        stream: The split.
        tokenizer: The tokenizer that made it.
        attack: The attack on each text.

    Returns:
        The attacked text, its counts, and how many words were replaced.

    Raises:
        DataError: The tokenizer has no token for a word that the attack inserts.
    """
    counts = Counter[str]()

    def swapped() -> Iterator[Document]:
        for number in range(stream.num_documents):
            *ids, _ = stream.read_document(number).tolist()
            begins = bool(tokenizer.before) and ids[:1] == tokenizer.before
            text, replaced = attack(tokenizer.decode(ids[1:] if begins else ids), number)
            counts.update(words=len(text.split()), bytes=len(text.encode()), replaced=replaced)
            yield Document(f"document {number}", text)

    with prefixed(f"{stream.prefix}.bin: cannot be attacked"):
        documents = [
            np.array([*tokenizer.before, *ids, tokenizer.end_of_text_id])
            for ids in encode_documents(tokenizer, swapped())
        ]
    attacked = TokenStream.of(stream.prefix, documents, tokenizer.vocab_size)
    info = SplitInfo(
        documents=len(documents),
        tokens=attacked.num_tokens,
        words=counts["words"],
        bytes=counts["bytes"],
    )
    return attacked, info, counts["replaced"]
