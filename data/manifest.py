"""What the descriptions of prepared folders share, of text and of images."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from polyad.data.files import flush_to_disk

MANIFEST_FILE = "manifest.json"
"""The description of a prepared folder; it is written last."""
SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Sealed = TypeVar("Sealed", bound=BaseModel)


def seal(tree: dict[str, Any]) -> str:
    """Digests all keys of a description but the digest itself, in canonical form."""
    others = {key: value for key, value in tree.items() if key != "sha256"}
    return hashlib.sha256(
        json.dumps(others, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def write_sealed(content: Sealed, path: Path) -> Sealed:
    """Writes a description with its digest, and waits until it is on the disk.

    Args:
        content: It has a field `sha256`.
        path: The file.

    Returns:
        The content with its digest.
    """
    sealed = content.model_copy(update={"sha256": seal(content.model_dump(mode="json"))})
    path.write_text(sealed.model_dump_json(indent=2) + "\n", encoding="utf-8")
    flush_to_disk(path)
    return sealed
