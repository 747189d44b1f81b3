"""A limit for the patterns of a tokenizer's file: none may take exponential time."""

import time
from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, pre_tokenizers

from polyad.data.errors import DataError

MOST_SECONDS = 0.02
"""Processor time of one short text; usual patterns take microseconds."""
LENGTHS = range(4, 33)
"""Characters of such a text: time that doubles with each character is seen long before the last."""
_TEXTS = ("a", " ", "1", "A", "\n", ".", "a ", "a1", "1 ", "a\n", "'s", "aA", ". ", "é")
_END = "\0"  # no pattern matches up to here, so all ways are tried


def check_patterns(tree: Any) -> None:
    """Refuses a pattern whose time grows exponentially with the text: it would never end.

    Args:
        tree: Of a `tokenizer.json`.

    Raises:
        DataError: There is one.
    """
    for pattern in _patterns(tree):
        shown = pattern if len(pattern) <= 80 else f"{pattern[:80]}..."
        try:
            splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
        except Exception as error:  # bare
            raise DataError(f"the pattern {shown!r} cannot be read: {error}") from None
        letters = sorted({each for each in pattern if each.isalnum()})[:40]
        for text in (*_TEXTS, *letters):
            if not _ends(splitter, text):
                raise DataError(
                    f"the pattern {shown!r} takes exponential time, as on {text * 8!r}: repetitions"
                    f" in repetitions do"
                )


def _ends(splitter: pre_tokenizers.Split, text: str) -> bool:
    for length in LENGTHS:
        probe = (text * length)[:length] + _END
        began = time.thread_time()
        try:
            splitter.pre_tokenize_str(probe)
        except BaseException as error:  # the library panics where its own limit is reached
            if type(error).__name__ != "PanicException":
                raise
            return False
        if time.thread_time() - began > MOST_SECONDS:
            return False
    return True


def _patterns(tree: Any) -> Iterator[str]:
    """The regular expressions of a tree, wherever they stand."""
    waiting = [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if isinstance(pattern := each.get("Regex"), str):
                yield pattern
            waiting += [value for key, value in each.items() if key not in ("vocab", "merges")]
        elif isinstance(each, list):
            waiting += each
