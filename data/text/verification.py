"""Checks of a prepared folder.

The checks on opening or replacing a folder take a time independent of its size; `verify_files`
reads every byte and compares it with the manifest.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, nearest
from polyad.data.prepared import MANIFEST_FILE, SPLITS, FileReport, Read, SplitName, read_pieces
from polyad.data.text.indexed import index_bytes, read_header, read_index
from polyad.data.text.manifest import (
    END_BYTES,
    FILES,
    UNSEALED_VERSION,
    Manifest,
    SplitInfo,
    ends_digest,
    plain_file,
)
from polyad.data.text.tokenizers.content import file_fingerprint
from polyad.data.text.tokenizers.files import load_tokenizer

AGAIN = "of another data set or damaged; prepare the data again"


def check_prepared(folder: Path) -> None:
    """Checks that a folder holds prepared data, complete or not.

    Args:
        folder: The folder.

    Raises:
        DataError: There is no such folder, or it has no manifest.
    """
    again = "make it with `polyad prepare`"
    if not folder.exists():
        raise DataError(
            f"{folder}: no such folder of prepared data{_nearest_folder(folder)}; {again}"
        )
    if not os.path.lexists(folder / MANIFEST_FILE):
        raise DataError(f"{folder}: not prepared data: it has no {MANIFEST_FILE}; {again}")


def _nearest_folder(folder: Path) -> str:
    try:
        siblings = list(folder.parent.iterdir())
    except OSError:
        return ""
    prepared = [entry.name for entry in siblings if (entry / MANIFEST_FILE).is_file()]
    return nearest(folder.name, prepared)


def check_replaceable(output: Path, *, overwrite: bool) -> None:
    """Refuses to touch a folder that `polyad prepare` did not make or may not replace.

    Raises:
        DataError: It holds something else, or prepared data that may not be replaced.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise DataError(f"{output}: is a file, but the output must be a folder")
    names = {entry.name for entry in output.iterdir()}
    if not names:
        return
    if MANIFEST_FILE not in names or names - FILES:
        other = sorted(names - FILES) or sorted(names)
        raise DataError(
            f"{output}: holds {other[0]!r}, which `polyad prepare` did not make there; choose "
            "another folder (nothing was changed)"
        )
    if not overwrite:
        raise DataError(
            f"{output}: holds prepared data of another request, or damaged; choose another folder "
            "or add --overwrite"
        )


def check_folder(folder: Path, manifest: Manifest) -> None:
    """Checks sizes, headers and both ends of each file, and the tokenizer.

    Args:
        folder: The folder.
        manifest: Its manifest.

    Raises:
        DataError: Something differs from the manifest.
    """
    for name in SPLITS:
        check_split(folder, name, manifest)
    check_tokenizer(folder, manifest)


def check_split(folder: Path, name: SplitName, manifest: Manifest) -> None:
    """Checks the two files of a split; see `check_folder`.

    Args:
        folder: The folder.
        name: The split.
        manifest: The folder's manifest.

    Raises:
        DataError: A file is missing, has another size, or is not the one in the manifest.
    """
    info = manifest.splits[name]
    tokens, index = check_tokens_size(folder, name, manifest), check_index_size(folder, name, info)
    check_index_header(index, info, manifest.dtype)
    if ends_digest(tokens, index) != info.ends_sha256:
        raise DataError(
            f"{tokens}: it or {index.name} is not the file that {MANIFEST_FILE} lists: {AGAIN}"
        )
    head, tail = _ends(tokens, manifest.dtype)
    for part in (head, tail):
        check_ids(tokens, part, manifest.tokenizer.vocab_size)
    begin = manifest.tokenizer.begin_of_text_id
    if len(head) and begin is not None and head[0] != begin:
        raise DataError(
            f"{tokens}: its first token is {head[0]}, where every document begins with "
            f"tokenizer.begin_of_text_id: {begin} of {MANIFEST_FILE}: {AGAIN}"
        )
    end = manifest.tokenizer.end_of_text_id
    if len(tail) and tail[-1] != end:
        raise DataError(
            f"{tokens}: its last token is {tail[-1]}, where every document ends with "
            f"tokenizer.end_of_text_id: {end} of {MANIFEST_FILE}: {AGAIN}"
        )


def check_tokens_size(folder: Path, name: SplitName, manifest: Manifest) -> Path:
    """Returns the .bin file of a split, after checking that it exists and has the right size.

    Raises:
        DataError: It does not.
    """
    itemsize = np.dtype(manifest.dtype).itemsize
    return _check_size(folder, f"{name}.bin", manifest.splits[name].tokens * itemsize)


def check_index_size(folder: Path, name: SplitName, info: SplitInfo) -> Path:
    """Returns the .idx file of a split, after checking that it exists and has the right size.

    Raises:
        DataError: It does not.
    """
    return _check_size(folder, f"{name}.idx", index_bytes(info.documents))


def _check_size(folder: Path, name: str, expected: int) -> Path:
    path = plain_file(folder, name)
    if not path.is_file():
        raise DataError(f"{path}: missing, but {MANIFEST_FILE} lists it; prepare the data again")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if size != expected:
        raise DataError(
            f"{path}: {size:,} bytes where {MANIFEST_FILE} says {expected:,}: cut short or {AGAIN}"
        )
    return path


def check_index_header(path: Path, info: SplitInfo, dtype: str) -> None:
    """Checks the header of an .idx file: format, token type, and number of entries.

    Raises:
        DataError: It differs.
    """
    header = read_header(path, dtype)
    if not header.is_of_dtype:
        raise DataError(f"{path}: does not begin as an index of {dtype} tokens does: {AGAIN}")
    if (header.sequences, header.bounds) != (info.documents, info.documents + 1):
        raise DataError(
            f"{path}: lists {header.sequences:,} documents where {MANIFEST_FILE} says "
            f"{info.documents:,}: {AGAIN}"
        )


def check_ids(
    path: Path, tokens: npt.NDArray[np.integer], vocab_size: int, start: int | None = None
) -> None:
    """Checks that tokens are in the vocabulary.

    Args:
        path: The path of their file, for the error.
        tokens: Some of its tokens.
        vocab_size: All ids are below this.
        start: Position of the first in the file, for the error, if known.

    Raises:
        DataError: A token is not.
    """
    if not len(tokens) or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
        return
    place = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
    which = "a token" if start is None else f"token {start + place:,}"
    raise DataError(
        f"{path}: damaged: {which} is {int(tokens[place]):,}, but the tokenizer's vocabulary ends "
        f"at {vocab_size - 1:,}"
    )


def _ends(path: Path, dtype: str) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """Reads the tokens at both ends of a file; checking all would read the whole file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(END_BYTES)
        file.seek(max(0, size - END_BYTES))
        return np.frombuffer(head, dtype), np.frombuffer(file.read(END_BYTES), dtype)


def check_tokenizer(folder: Path, manifest: Manifest) -> Path:
    """Returns the tokenizer's file, after checking that it made the tokens.

    Args:
        folder: The folder.
        manifest: Its manifest.

    Returns:
        The file.

    Raises:
        DataError: It is missing, unreadable or another one.
    """
    info = manifest.tokenizer
    path = plain_file(folder, info.file)
    try:
        found = file_fingerprint(path, info.end_of_text)
        size = path.stat().st_size
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a readable tokenizer: {error}") from None
    if found != info.fingerprint:
        raise DataError(
            f"{path}: not the tokenizer that made these tokens (fingerprint {found[:12]}..., "
            f"{MANIFEST_FILE} says {info.fingerprint[:12]}...)"
        )
    if info.vocab_size > size:  # impossible, since each entry takes more than a byte
        raise DataError(
            f"{path}: does not match the tokenizer.vocab_size: {info.vocab_size} in {MANIFEST_FILE}"
        )
    return path


T = TypeVar("T")
Problem: TypeAlias = DataError | OSError


def bytes_to_verify(folder: Path) -> int:
    """Counts the bytes that `verify_files` reads, in files that grow with the data.

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
        A sentence; None if everything can be verified.
    """
    if manifest.format_version > UNSEALED_VERSION:
        return None
    return (
        f"prepared by an earlier version, without digests of {MANIFEST_FILE} and the .idx files: "
        f"in {MANIFEST_FILE} only form, ranges and fingerprint were checked, not the counts of "
        f"words and bytes or the options; each .idx was compared with its .bin"
    )


def verify_files(folder: Path, read: Read = lambda count: None) -> Iterator[FileReport]:
    """Reads every file of a prepared folder, even after a damaged one.

    Args:
        folder: The folder.
        read: Called as the files are read.

    Yields:
        The result for each file, the manifest first: the others are checked against it.
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
            f"{folder / name}.idx: damaged: documents in {name}.bin end elsewhere than it says; "
            "prepare the data again"
        )
    if bad_index is None and bad_tokens is None:  # the digest of the ends covers both files
        _, bad_tokens = _attempt(lambda: check_split(folder, name, manifest))
    sealed = manifest.splits[name].index_sha256 is not None
    by = "SHA-256, " if sealed else ""
    yield _report(folder, f"{name}.idx", f"{by}ends of documents", bad_index)
    yield _report(folder, f"{name}.bin", "SHA-256, token ids", bad_tokens)


def _verify_index(
    folder: Path, name: SplitName, manifest: Manifest, read: Read
) -> npt.NDArray[np.int64]:
    """Reads an .idx file; returns the end of each document, one past its last token."""
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
    """Reads a .bin file; returns whether documents end exactly where the index says."""
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
    """Loads the tokenizer and compares its entries with the manifest."""
    info = manifest.tokenizer
    path = check_tokenizer(folder, manifest)
    tokenizer = load_tokenizer(path, info.end_of_text)
    for key in ("vocab_size", "end_of_text_id", "begin_of_text_id"):
        actual, recorded = getattr(tokenizer, key), getattr(info, key)
        if recorded is None:  # older manifests lack these tokens, whatever the tokenizer says
            continue
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
