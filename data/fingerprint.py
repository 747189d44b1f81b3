"""Fingerprints of tokenizers: a digest of the file and of the token that ends documents."""

import hashlib
import json
from pathlib import Path

from polyad.data.errors import DataError
from polyad.data.json_reader import parse_json


def canonical(content: str) -> str:
    """Rewrites the text of a `tokenizer.json` in canonical form, without truncation and padding.

    Args:
        content: The text.

    Returns:
        The same tokenizer, keys sorted.
    """
    # Not the library's own serialization: it may change with the library's version, and would
    # change the fingerprint of prepared data.
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
    """Digests a tokenizer by its file, as its own `fingerprint` does.

    Args:
        path: A `tokenizer.json` or a SentencePiece `.model`.
        end_of_text: The token that ends each document.

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
    """Digests a tokenizer that is stored in bytes.

    Args:
        model: All of its file.
        end_of_text: The token that ends each document.

    Returns:
        A SHA-256, hexadecimal.
    """
    return hashlib.sha256(model + f"\0{end_of_text}".encode()).hexdigest()
