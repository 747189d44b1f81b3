"""The content of a tokenizer file: its canonical form, its fingerprint, and its safety limits.

Text must not grow without bound, encoding must not be random, and no pattern may take exponential
time.
"""

import hashlib
import json
import re
import struct
import time
import unicodedata
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

from polyad.data.errors import DataError
from polyad.data.json_reader import parse_json

MOST_GROWTH = 32
"""Maximum number of characters from one character of a text, or of a token when decoded."""
MOST_AFFIX = 100
"""Maximum length of a model's subword prefix or suffix, or of its unknown token, in characters."""
CHANCE = ("dropout", "alpha", "nbest_size")
"""Keys of a model (BPE or unigram) that make the encoding of a text random."""

TEMPLATE = "TemplateProcessing"
"""The type of a post-processor that puts special tokens around a text."""

_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix", "unk_token")
# A pattern with one of these may match between two characters, and so insert without replacing.
_MAY_BE_EMPTY = re.compile(r"\(\?[=!<]|\\[bBAzZGK]|(?<!\[)\^|\$")


class _Step(NamedTuple):
    """A step that makes text longer.

    Attributes:
        name: Its type, for an error message.
        growth: Maximum number of characters that it makes of one.
        content: The characters that it writes; None: any.
        pattern: The characters that it replaces, all of them together; None: any.
    """

    name: str
    growth: int
    content: frozenset[str] | None
    pattern: frozenset[str] | None


def check_growth(content: str) -> int:
    """Refuses a tokenizer that makes texts much longer and could exhaust memory.

    Returns:
        The maximum number of characters that its normalizer makes of one.

    Raises:
        DataError: A component makes more than `MOST_GROWTH` characters of one.
    """
    value = parse_json(content, "")
    model = value.get("model")
    for key in _AFFIXES if isinstance(model, dict) else ():
        if isinstance(affix := model.get(key), str) and len(affix) > MOST_AFFIX:
            raise DataError(f"model.{key}: {len(affix):,} characters; at most {MOST_AFFIX}")
    growth = {name: _growth(name, value.get(name)) for name in _PARTS}
    return growth["normalizer"]


def check_charsmap(charsmap: bytes) -> None:
    """Refuses a SentencePiece table of replacements that makes texts much longer.

    Raises:
        DataError: It makes more than `MOST_GROWTH` characters of one.
    """
    _refuse("normalizer", "the table of replacements", _longest_replacement(charsmap))


def chance_of(content: str) -> dict[str, Any]:
    """Finds the keys that make the encoding of a text random.

    Args:
        content: The text of a `tokenizer.json`.

    Returns:
        The keys in `CHANCE` that its model sets, with their values.
    """
    model = parse_json(content, "").get("model")
    found = {key: model.get(key) for key in CHANCE} if isinstance(model, dict) else {}
    return {key: setting for key, setting in found.items() if setting is not None}


def without_chance(content: str) -> str:
    """Removes the keys that make the encoding of a text random.

    Args:
        content: The text of a `tokenizer.json`.

    Returns:
        The same without the keys that `chance_of` finds.
    """
    value = parse_json(content, "")
    value["model"] |= dict.fromkeys(chance_of(content))
    return json.dumps(value, ensure_ascii=False)


def begin_of_text(content: str) -> str | None:
    """Returns the token that the file puts before a text.

    Args:
        content: The text of a `tokenizer.json`.

    Returns:
        The special token at the start of its post-processor's template; None if there is none, or
            if there is one at the end too: such a template, like BERT's, encloses a sequence.
    """
    for step in _flat(parse_json(content, "").get("post_processor")):
        if step.get("type") == TEMPLATE and (parts := step.get("single")):
            first, last = parts[0].get("SpecialToken"), parts[-1]
            return str(first["id"]) if first and "Sequence" in last else None
    return None


def with_begin_of_text(content: str, token: str | None, number: int | None) -> str:
    """Changes what the file puts before a text, and nothing else.

    Args:
        content: The text of a `tokenizer.json`.
        token: The token; None for none.
        number: Its id.

    Returns:
        The file for which `begin_of_text` gives that token.
    """
    value = parse_json(content, "")
    steps = [each for each in _flat(value.get("post_processor")) if each["type"] != TEMPLATE]
    if token is not None:
        begin = [{"SpecialToken": {"id": token, "type_id": kind}} for kind in (0, 1)]
        text = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
        steps.append(
            {
                "type": TEMPLATE,
                "single": [begin[0], text[0]],
                "pair": [begin[0], text[0], begin[1], text[1]],
                "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
            }
        )
    value["post_processor"] = {"type": "Sequence", "processors": steps} if steps else None
    return json.dumps(value, ensure_ascii=False)


def _growth(part: str, value: Any) -> int:
    """Follows the output of one step through the later steps."""
    steps: list[_Step] = []
    reached: list[int] = []
    largest = 1
    for step in filter(None, map(_step, _flat(value))):
        before = [
            total for earlier, total in zip(steps, reached, strict=True) if _feeds(earlier, step)
        ]
        steps.append(step)
        reached.append(step.growth * max(before, default=1))
        _refuse(part, step.name, reached[-1])
        largest = max(largest, reached[-1])
    return largest


def _refuse(part: str, name: str, growth: int) -> None:
    if growth > MOST_GROWTH:
        raise DataError(
            f"{part}: {name} makes up to {growth:,} characters of one; at most {MOST_GROWTH}"
        )


def _feeds(earlier: _Step, later: _Step) -> bool:
    if earlier.content is None or later.pattern is None:
        return True
    return not earlier.content.isdisjoint(later.pattern)


def _flat(value: Any) -> Iterator[dict[str, Any]]:
    """Walks through nested sequences of steps, whatever each component calls its list."""
    if not isinstance(value, dict):
        return
    if value.get("type") != "Sequence":
        yield value
        return
    for steps in value.values():
        for step in steps if isinstance(steps, list) else ():
            yield from _flat(step)


def _step(value: dict[str, Any]) -> _Step | None:
    """Reads one step; None if it makes no text longer than Unicode's own forms do."""
    kind = value.get("type")
    if kind == "Precompiled":
        charsmap = b64decode(value.get("precompiled_charsmap") or "")
        growth, content, pattern = _longest_replacement(charsmap), None, None
    elif kind == "Prepend":
        content = frozenset(_decomposed(value.get("prepend")))
        growth, pattern = len(_decomposed(value.get("prepend"))), None
    elif kind == "Replace":
        text = _decomposed(value.get("content"))
        growth, pattern = _replace_growth(value.get("pattern"), text)
        content = frozenset(text)
    elif kind == "BertNormalizer" and value.get("handle_chinese_chars"):
        growth, content, pattern = 3, frozenset(" "), None  # a space on both sides
    else:
        return None
    return _Step(str(kind), growth, content, pattern) if growth > 1 else None


def _decomposed(text: Any) -> str:
    """Returns what a later normal form may make of a step's output."""
    return unicodedata.normalize("NFKD", text) if isinstance(text, str) else ""


def _replace_growth(pattern: Any, text: str) -> tuple[int, frozenset[str] | None]:
    if isinstance(pattern, dict) and isinstance(literal := pattern.get("String"), str):
        if literal:
            return -(-len(text) // len(literal)), frozenset(literal)
        return 1 + len(text), None
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    if not text or not isinstance(expression, str):
        return len(text), None
    return len(text) + _may_match_nothing(expression), None


def _may_match_nothing(expression: str) -> bool:
    if _MAY_BE_EMPTY.search(expression):
        return True
    step = normalizers.Replace(Regex(expression), "\0")
    # In a text of one character, a match beside that character is an empty match.
    return any(
        "\0" in (result := step.normalize_str(character)) and character in result
        for character in {*"a0 \n.", *expression} - {"\0"}
    )


def _longest_replacement(charsmap: bytes) -> int:
    """Reads a table: a size, an index of that many bytes, strings that end in NUL."""
    if len(charsmap) < 4:
        return 1
    (index_bytes,) = struct.unpack("<I", charsmap[:4])
    strings = charsmap[4 + index_bytes :].decode("utf-8", errors="replace")
    return max(1, *map(len, strings.split("\0")))


MOST_SECONDS = 0.02
"""Maximum processor time for one short text; usual patterns take microseconds."""
LENGTHS = range(4, 33)
"""Lengths of the test texts: exponential time shows long before the last."""
_TEXTS = ("a", " ", "1", "A", "\n", ".", "a ", "a1", "1 ", "a\n", "'s", "aA", ". ", "é")
_END = "\0"  # no pattern matches up to here, so every alternative is tried


def check_patterns(tree: Any) -> None:
    """Refuses a pattern whose time grows exponentially with the text.

    Raises:
        DataError: There is such a pattern.
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
        except BaseException as error:  # the library panics when its own limit is reached
            if type(error).__name__ != "PanicException":
                raise
            return False
        if time.thread_time() - began > MOST_SECONDS:
            return False
    return True


def _patterns(tree: Any) -> Iterator[str]:
    """Yields the regular expressions anywhere in a tree."""
    waiting = [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if isinstance(pattern := each.get("Regex"), str):
                yield pattern
            waiting += [value for key, value in each.items() if key not in ("vocab", "merges")]
        elif isinstance(each, list):
            waiting += each


def canonical(content: str) -> str:
    """Rewrites a `tokenizer.json` in canonical form, without truncation and padding.

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
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def fingerprint(content: str, end_of_text: str) -> str:
    """Digests a tokenizer.

    Args:
        content: The text of a `tokenizer.json` in any form.
        end_of_text: The token that ends each document.

    Returns:
        A SHA-256, hexadecimal.
    """
    return hashlib.sha256(f"{canonical(content)}\0{end_of_text}".encode()).hexdigest()


def file_fingerprint(path: Path, end_of_text: str) -> str:
    """Digests a tokenizer file; equal to the `fingerprint` of the loaded tokenizer.

    Returns:
        A SHA-256, hexadecimal.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a `tokenizer.json`.
    """
    if path.suffix == ".model":
        return bytes_fingerprint(path.read_bytes(), end_of_text)
    return fingerprint(path.read_text(encoding="utf-8"), end_of_text)


def bytes_fingerprint(model: bytes, end_of_text: str) -> str:
    """Digests a tokenizer in a binary format.

    Returns:
        A SHA-256, hexadecimal.
    """
    return hashlib.sha256(model + f"\0{end_of_text}".encode()).hexdigest()
