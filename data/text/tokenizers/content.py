"""The content of a tokenizer file: its canonical form, its fingerprint, what it adds to a text."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from polyad.data.errors import DataError
from polyad.data.json_reader import parse_json

CHANCE = ("dropout", "alpha", "nbest_size")
"""Keys of a model (BPE or unigram) that make the encoding of a text random."""

TEMPLATE = "TemplateProcessing"
"""The type of a post-processor that puts special tokens around a text."""


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


def fingerprint(content: str, end_of_text: str) -> str:
    """Digests a tokenizer.

    Args:
        content: The text of a `tokenizer.json` in any form.
        end_of_text: The token that ends each document.

    Returns:
        A SHA-256, hexadecimal.
    """
    return hashlib.sha256(f"{canonical(content)}\0{end_of_text}".encode()).hexdigest()


def bytes_fingerprint(model: bytes, end_of_text: str) -> str:
    """Digests a tokenizer in a binary format.

    Returns:
        A SHA-256, hexadecimal.
    """
    return hashlib.sha256(model + f"\0{end_of_text}".encode()).hexdigest()
