"""The progress of an interrupted `polyad prepare`: `resume.json`, in its unfinished folder."""

import os
from pathlib import Path

from pydantic import ValidationError

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.fingerprint import file_fingerprint
from polyad.data.text.manifest import (
    LENGTHS_SUFFIX,
    SPLITS,
    Request,
    SplitName,
    TokenizerFile,
    flush_to_disk,
)
from polyad.data.text.split_writer import SplitState
from polyad.data.text.tokenizers.tokenizer import Tokenizer

RESUME_FILE, DRAFT_FILE = "resume.json", "resume.json.draft"


class Resume(Config):
    """Where encoding can go on."""

    request: Request
    """What was asked for: another request has no use for these files."""
    tokenizer_file: TokenizerFile
    """The tokenizer, given or trained, beside this file."""
    end_of_text: str
    """Its end-of-text token."""
    tokenizer_fingerprint: str
    documents: int
    """Documents of the text, from its beginning, that the files hold; each part of one counts."""
    splits: dict[SplitName, SplitState]
    """How far each split is written."""
    part: str = ""
    """Which part of the text, as in `3 of 8`; empty of all of it."""
    held: str = ""
    """Text of a document that goes on, which is read but not in the files."""


def save_resume(
    folder: Path,
    request: Request,
    tokenizer: Tokenizer,
    documents: int,
    splits: dict[SplitName, SplitState],
    held: str = "",
    part: str = "",
) -> None:
    """Writes how far the files are written, after their content is on the disk.

    Args:
        folder: Where the files are.
        request: What was asked for.
        tokenizer: Encodes the text; it is saved in the folder.
        documents: Documents of the text, and parts of them, that the files hold.
        splits: How far each split is written.
        held: Text of a document that goes on, which is read but not in the files.
        part: Which part of the text; empty of all of it.
    """
    content = Resume(
        request=request,
        tokenizer_file=tokenizer.file_name,
        end_of_text=tokenizer.end_of_text,
        tokenizer_fingerprint=tokenizer.fingerprint,
        documents=documents,
        splits=splits,
        held=held,
        part=part,
    ).model_dump_json()
    draft = folder / DRAFT_FILE
    draft.write_text(content, encoding="utf-8")
    flush_to_disk(draft)
    os.replace(draft, folder / RESUME_FILE)
    flush_to_disk(folder)


def read_resume(folder: Path, request: Request, part: str = "") -> Resume | None:
    """Reads where the same request was interrupted.

    Args:
        folder: Where it wrote.
        request: What is asked for now.
        part: Which part of it; empty for all.

    Returns:
        Where to go on; None where there is nothing, or of another request, or damaged.
    """
    try:
        found = Resume.model_validate_json((folder / RESUME_FILE).read_text(encoding="utf-8"))
        tokenizer = file_fingerprint(folder / found.tokenizer_file, found.end_of_text)
    except (OSError, ValueError, ValidationError, DataError):
        return None
    whole = set(found.splits) == set(SPLITS) and tokenizer == found.tokenizer_fingerprint
    return found if whole and (found.request, found.part) == (request, part) else None


def remove_resume(folder: Path, *, lengths: bool = True) -> None:
    """Removes the files that only an interrupted call needs.

    Args:
        folder: Where the files are, complete now but for the manifest.
        lengths: Whether the lengths of documents are of no more use either.
    """
    names = [f"{split}{LENGTHS_SUFFIX}" for split in SPLITS] if lengths else []
    for name in (RESUME_FILE, DRAFT_FILE, *names):
        (folder / name).unlink(missing_ok=True)
