"""Checks of a prepared folder, when it is opened or to be replaced; their time does not grow with
its files."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, nearest
from polyad.data.fingerprint import file_fingerprint
from polyad.data.prepared import MANIFEST_FILE, SPLITS, SplitName
from polyad.data.text.manifest import (
    END_BYTES,
    FILES,
    Manifest,
    SplitInfo,
    ends_digest,
    plain_file,
)
from polyad.data.text.split_files import index_bytes, read_header

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
    """Refuses to touch a folder that `polyad prepare` did not make, or may not replace.

    Args:
        output: Where prepared data shall be.
        overwrite: Whether prepared data there may be replaced.

    Raises:
        DataError: There is something else, or prepared data that may not be replaced.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise DataError(f"{output}: is a file; the output is a folder")
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
        manifest: What it says about itself.

    Raises:
        DataError: Not what the manifest says.
    """
    for name in SPLITS:
        check_split(folder, name, manifest)
    check_tokenizer(folder, manifest)


def check_split(folder: Path, name: SplitName, manifest: Manifest) -> None:
    """Checks the two files of a split; see `check_folder`.

    Args:
        folder: The folder.
        name: The split.
        manifest: What the folder says about itself.

    Raises:
        DataError: A file is missing, of another size, or not the one that the manifest lists.
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
    end = manifest.tokenizer.end_of_text_id
    if len(tail) and tail[-1] != end:
        raise DataError(
            f"{tokens}: its last token is {tail[-1]}, where every document ends with "
            f"tokenizer.end_of_text_id: {end} of {MANIFEST_FILE}: {AGAIN}"
        )


def check_tokens_size(folder: Path, name: SplitName, manifest: Manifest) -> Path:
    """Returns the .bin file of a split, after checking that it exists and has the right size.

    Raises:
        DataError: It is not.
    """
    itemsize = np.dtype(manifest.dtype).itemsize
    return _check_size(folder, f"{name}.bin", manifest.splits[name].tokens * itemsize)


def check_index_size(folder: Path, name: SplitName, info: SplitInfo) -> Path:
    """Returns the .idx file of a split, after checking that it exists and has the right size.

    Raises:
        DataError: It is not.
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
    """Checks the head of an .idx file: format, type of a token, and how much it lists.

    Args:
        path: The file.
        info: What it should list.
        dtype: Type of a token.

    Raises:
        DataError: It is not so.
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
        path: Of their file, for the error.
        tokens: Some of it.
        vocab_size: All ids are below this.
        start: Number of the first in the file, for the error, if it is known.

    Raises:
        DataError: One is not.
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
    """Tokens of both ends of a file; checking all tokens would read the whole file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(END_BYTES)
        file.seek(max(0, size - END_BYTES))
        return np.frombuffer(head, dtype), np.frombuffer(file.read(END_BYTES), dtype)


def check_tokenizer(folder: Path, manifest: Manifest) -> Path:
    """Returns the tokenizer's file, after checking that it is the one that made the tokens.

    Args:
        folder: The folder.
        manifest: What it says about itself.

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
            f"{path}: cannot have the tokenizer.vocab_size: {info.vocab_size} of {MANIFEST_FILE}"
        )
    return path
