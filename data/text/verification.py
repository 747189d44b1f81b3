"""Reads every byte of a prepared folder and compares it with the manifest."""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError
from polyad.data.prepared import MANIFEST_FILE, SPLITS, FileReport, Read, SplitName, read_pieces
from polyad.data.text.checks import (
    AGAIN,
    check_ids,
    check_index_header,
    check_index_size,
    check_split,
    check_tokenizer,
    check_tokens_size,
)
from polyad.data.text.manifest import UNSEALED_VERSION, Manifest
from polyad.data.text.split_files import read_index
from polyad.data.text.tokenizers.files import load_tokenizer

T = TypeVar("T")
Problem: TypeAlias = DataError | OSError


def bytes_to_verify(folder: Path) -> int:
    """Counts the bytes that `verify_files` will read, of files that grow with the data.

    Args:
        folder: The folder.

    Returns:
        Bytes.
    """
    return sum(_size(folder / f"{name}.{end}") for name in SPLITS for end in ("idx", "bin"))


def unsealed(manifest: Manifest) -> str | None:
    """Describes what cannot be verified in a folder that an earlier version prepared.

    Args:
        manifest: The folder's.

    Returns:
        A sentence; None where all of it can be.
    """
    if manifest.format_version > UNSEALED_VERSION:
        return None
    return (
        f"prepared before {MANIFEST_FILE} and the .idx files had digests: of {MANIFEST_FILE} only "
        f"form, ranges and fingerprint were checked, so not the counts of words and bytes nor what "
        f"was asked for; each .idx was compared with where documents end in its .bin; the rest has "
        f"digests"
    )


def verify_files(folder: Path, read: Read = lambda count: None) -> Iterator[FileReport]:
    """Reads every file of a prepared folder, whatever is wrong with those before it.

    Args:
        folder: The folder.
        read: Called as the files are read.

    Yields:
        What each file showed, the manifest first: without it nothing is known of the others.
    """
    try:
        manifest = Manifest.read(folder)
    except (DataError, OSError) as error:
        yield _report(folder, MANIFEST_FILE, "", error)
        return
    sealed = manifest.format_version > UNSEALED_VERSION
    form = "form, ranges, fingerprint"
    yield _report(folder, MANIFEST_FILE, f"SHA-256, {form}" if sealed else form, None)
    _, reason = _attempt(lambda: _verify_tokenizer(folder, manifest))
    yield _report(folder, manifest.tokenizer.file, "fingerprint, entries", reason)
    for name in SPLITS:
        yield from _verify_split(folder, name, manifest, read)


def _verify_split(
    folder: Path, name: SplitName, manifest: Manifest, read: Read
) -> Iterator[FileReport]:
    ends_D, bad_index = _attempt(lambda: _verify_index(folder, name, manifest, read))
    agree, bad_tokens = _attempt(lambda: _verify_tokens(folder, name, manifest, ends_D, read))
    if bad_index is None and agree is False:
        bad_index = DataError(
            f"{folder / name}.idx: damaged: documents end elsewhere in {name}.bin than it says; "
            f"prepare the data again"
        )
    if bad_index is None and bad_tokens is None:  # the digest of their ends is of both files
        _, bad_tokens = _attempt(lambda: check_split(folder, name, manifest))
    sealed = manifest.splits[name].index_sha256 is not None
    by = "SHA-256, " if sealed else ""
    yield _report(folder, f"{name}.idx", f"{by}ends of documents", bad_index)
    yield _report(folder, f"{name}.bin", "SHA-256, token ids", bad_tokens)


def _verify_index(
    folder: Path, name: SplitName, manifest: Manifest, read: Read
) -> npt.NDArray[np.int64]:
    """Reads an .idx file; returns where its documents end, as one past the last token of each."""
    info = manifest.splits[name]
    path = check_index_size(folder, name, info)
    check_index_header(path, info, manifest.dtype)
    digest = hashlib.sha256()
    for piece in read_pieces(path, read):
        digest.update(piece)
    if info.index_sha256 is not None:
        _check_digest(path, digest, info.index_sha256)
    count = info.documents
    lengths_D, places_D, bounds_D = read_index(path, count)
    ends_D = np.cumsum(lengths_D, dtype=np.int64)
    starts_D = (ends_D - lengths_D) * np.dtype(manifest.dtype).itemsize
    whole = (
        bool((lengths_D > 0).all())
        and (int(ends_D[-1]) if count else 0) == info.tokens
        and np.array_equal(places_D, starts_D)
        and np.array_equal(bounds_D, np.arange(count + 1))
    )
    if not whole:
        raise DataError(
            f"{path}: damaged: lengths and places of its documents do not go together with each "
            f"other and {info.tokens:,} tokens; prepare the data again"
        )
    return ends_D


def _verify_tokens(
    folder: Path,
    name: SplitName,
    manifest: Manifest,
    ends_D: npt.NDArray[np.int64] | None,
    read: Read,
) -> bool:
    """Reads a .bin file; says whether documents, and nothing else, end where the index says."""
    info, tokenizer = manifest.splits[name], manifest.tokenizer
    path = check_tokens_size(folder, name, manifest)
    itemsize = np.dtype(manifest.dtype).itemsize
    digest, start, agree = hashlib.sha256(), 0, True
    outside: Problem | None = None
    for piece in read_pieces(path, read):
        digest.update(piece)
        tokens = np.frombuffer(piece[: len(piece) // itemsize * itemsize], manifest.dtype)
        if outside is None:
            _, outside = _attempt(partial(check_ids, path, tokens, tokenizer.vocab_size, start))
        if ends_D is not None and agree:
            first, last = np.searchsorted(ends_D, [start, start + len(tokens)], side="right")
            found = np.flatnonzero(tokens == tokenizer.end_of_text_id) + (start + 1)
            agree = np.array_equal(found, ends_D[first:last])
        start += len(tokens)
    if outside is not None:
        raise outside
    _check_digest(path, digest, info.sha256)
    return agree


def _verify_tokenizer(folder: Path, manifest: Manifest) -> None:
    """Loads the tokenizer and compares its entries with what the manifest says of them."""
    info = manifest.tokenizer
    path = check_tokenizer(folder, manifest)
    tokenizer = load_tokenizer(path, info.end_of_text)
    for key in ("vocab_size", "end_of_text_id"):
        actual, recorded = getattr(tokenizer, key), getattr(info, key)
        if actual != recorded:
            raise DataError(
                f"{folder / MANIFEST_FILE}: key 'tokenizer.{key}': {recorded}, but that of "
                f"{path.name} is {actual}"
            )


def _check_digest(path: Path, digest: "hashlib._Hash", expected: str) -> None:
    if digest.hexdigest() != expected:
        raise DataError(
            f"{path}: damaged: its SHA-256 is {digest.hexdigest()[:12]}..., {MANIFEST_FILE} says "
            f"{expected[:12]}...: {AGAIN}"
        )


def _attempt(check: Callable[[], T]) -> tuple[T | None, Problem | None]:
    try:
        return check(), None
    except (DataError, OSError) as error:
        return None, error


def _report(folder: Path, name: str, checked: str, error: Problem | None) -> FileReport:
    path = folder / name
    reason = None if error is None else str(error)
    if isinstance(error, OSError):
        reason = f"{path}: cannot be read: {error.strerror or error}"
    return FileReport(name, _size(path), checked, reason)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
