"""Finds the files that documents of a prepared folder came from, if these are unchanged.

A prepared folder stores no names of documents. If the names, sizes and times of the files still
have the digest that it stores, they give the same documents in the same order.
"""

from collections.abc import Collection

from polyad.data.errors import DataError
from polyad.data.prepared import LeftOut, SplitName
from polyad.data.tables import HUB
from polyad.data.text.manifest import Manifest
from polyad.data.text.sources import SHORT_NAMES, ReadOptions, open_source
from polyad.data.text.splits import Sources

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
    fractions: dict[SplitName, float] = {}
    if first == "train":
        fractions = {"validation": request.validation_fraction, "test": request.test_fraction}
    by_position = first == "train" and manifest.split_by == "position"
    spec = elsewhere.get(first) or request.source
    is_on_hub = spec.startswith(HUB) or spec in SHORT_NAMES
    if not documents or by_position or is_on_hub or request.part is not None:
        return {}
    options = ReadOptions(
        text_key=request.text_key,
        documents=request.documents or "files",
        file_format=request.file_format,
    )
    names: dict[int, str] = {}
    number, last = 0, max(documents)
    try:
        source = open_source(spec, options)
        if not source.endings() or source.total_bytes > MOST_BYTES:
            return {}
        if source.listing_digest() != request.listings[first]:
            return {}
        for of, document in Sources({first: source}, fractions, "documents").assigned(LeftOut()):
            if of == split:
                if number in documents:
                    names[number] = document.name
                number += 1
                if number > last:
                    break
    except (DataError, OSError):
        return {}
    return names
