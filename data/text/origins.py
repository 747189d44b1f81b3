"""Finds the files that documents of a prepared folder came from, if these are unchanged.

A prepared folder stores no names of documents. If the names, sizes and times of the files still
have the digest that it stores, they give the same documents in the same order.
"""

from collections.abc import Collection

from polyad.data.errors import DataError, user_path
from polyad.data.prepared import LeftOut, SplitName
from polyad.data.text.documents import PYTHON_STDLIB, FileSource, open_source
from polyad.data.text.folders import PACKAGE
from polyad.data.text.manifest import Manifest
from polyad.data.text.readers import MODULE, TEXT
from polyad.data.text.source import Sources

MOST_BYTES = 256 * 2**20
"""Maximum size of the files to read again, in bytes: this takes seconds."""


def files_of_documents(
    manifest: Manifest, split: SplitName, documents: Collection[int]
) -> dict[int, str]:
    """Names the files that documents came from.

    Args:
        manifest: The manifest of the prepared folder.
        split: The split of the documents.
        documents: Their numbers in the split, from 0.

    Returns:
        By document number, the file relative to the source, followed by `#N` for document N of a
        file with several. Empty if files have changed or are gone, come from a hub, have more than
        `MOST_BYTES`, or have so few documents that their text was split by position; and for text
        that was prepared in parts.
    """
    request = manifest.request
    first: SplitName = split if split in request.listings else "train"
    elsewhere = {"validation": request.validation_source, "test": request.test_source}
    spec = elsewhere.get(first) or request.source
    fractions: dict[SplitName, float] = {
        "validation": request.validation_fraction,
        "test": request.test_fraction,
    }
    by_position = first == "train" and manifest.split_by == "position"
    if not documents or by_position or request.part is not None:
        return {}
    try:
        if spec != PYTHON_STDLIB and not spec.startswith(PACKAGE) and not user_path(spec).exists():
            return {}
        source = open_source(
            spec,
            text_key=request.text_key,
            documents=request.documents or "files",
            file_format=request.file_format,
        )
        if not isinstance(source, FileSource) or source.total_bytes > MOST_BYTES:
            return {}
        if source.listing_digest() != request.listings[first]:
            return {}
        return _names(source, first, fractions, split, documents)
    except (DataError, OSError):
        return {}


def _names(
    source: FileSource,
    first: SplitName,
    fractions: dict[SplitName, float],
    split: SplitName,
    documents: Collection[int],
) -> dict[int, str]:
    whole = {f"{file.name}#0": file.name for file in source.files if file.format in (TEXT, MODULE)}
    dealt = fractions if first == "train" else {}
    found: dict[int, str] = {}
    number, last = 0, max(documents)
    for of, document in Sources({first: source}, dealt, "documents").assigned(LeftOut()):
        if of == split:
            if number in documents:
                found[number] = whole.get(document.name, document.name)
            number += 1
            if number > last:
                break
    return found
