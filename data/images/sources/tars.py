"""WebDataset: tar files whose members of one name are a sample, as 000.jpg with 000.cls.

Headers are read here, not by `tarfile`, which takes three times as long; each one's checksum is
compared.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data.errors import DataError
from data.images.shards import Entry, Shard
from data.images.sources.found import IMAGE_SUFFIXES, Found, split_of

BLOCK = 512
CLASS_KEYS = ("cls", "label", "class")
"""Endings of a member, or keys of a `.json`, that hold the number of the class."""
CLASSES_FILE = "classes.txt"
"""Beside the tars, or in a folder around them: the names of the classes, one a line."""


class Member(NamedTuple):
    """A file in a tar."""

    name: str
    offset: int
    size: int


def members(file: BinaryIO, path: Path) -> Iterator[Member]:
    """Lists the files of a tar.

    Raises:
        DataError: A header is damaged, or the file ends too early.
    """
    end = path.stat().st_size
    at, long_name = 0, None
    while True:
        file.seek(at)
        header = file.read(BLOCK)
        if not header.strip(b"\0"):
            return
        kind, name, size = _parsed(header, path, at)
        begin = at + BLOCK
        if begin + size > end:
            raise DataError(f"{path}: {name}: the file ends before this member does")
        at = begin + -(-size // BLOCK) * BLOCK
        if kind == b"L":
            long_name = file.read(size).rstrip(b"\0").decode("utf-8", "replace")
        elif kind == b"x":
            long_name = _pax_path(file.read(size)) or long_name
        elif kind in b"0\0":
            yield Member(long_name or name, begin, size)
            long_name = None
        elif kind != b"g":
            long_name = None


def _parsed(header: bytes, path: Path, at: int) -> tuple[bytes, str, int]:
    """Type, name and size of a member, after its checksum."""
    try:
        written = int(header[148:156].strip(b" \0") or b"0", 8)
        if len(header) < BLOCK or sum(header[:148]) + sum(header[156:]) + 8 * 32 != written:
            raise ValueError
        field = header[124:136]
        large = bool(field[0] & 0x80)  # sizes from 8 GiB on are binary
        size = int.from_bytes(field[1:], "big") if large else int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise DataError(
            f"{path}: the header at byte {at:,} is damaged: its checksum is wrong"
        ) from None
    name = header[:100].split(b"\0", 1)[0].decode("utf-8", "replace")
    prefix = header[345:500].split(b"\0", 1)[0].decode("utf-8", "replace")
    has_prefix = header[257:263] == b"ustar\0" and prefix
    return header[156:157], f"{prefix}/{name}" if has_prefix else name, size


def _pax_path(records: bytes) -> str | None:
    """The path of a pax header: records of `LENGTH KEY=VALUE`, each with a line feed."""
    while records:
        head, _, rest = records.partition(b" ")
        if not head.isdigit() or not len(head) < int(head) <= len(records):
            return None
        length = int(head)
        key, _, value = rest[: length - len(head) - 1].rstrip(b"\n").partition(b"=")
        if key == b"path":
            return value.decode("utf-8", "replace")
        records = records[length:]
    return None


def open_tars(path: Path) -> Found:
    """Opens a tar, or a folder of them, by their names or in folders of splits.

    A tar belongs to the split that its name or its folder's name says, as `train-0000.tar`, and
    otherwise to train.

    Raises:
        DataError: There is none.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.tar"))
    shards = [
        Shard(path=str(file.resolve()), kind="range", size=file.stat().st_size) for file in files
    ]
    by_split: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        by_split.setdefault(split_of(file, path), []).append(number)
    root = path if path.is_dir() else path.parent

    def entries(numbers: list[int]) -> Iterator[Entry]:
        for number in numbers:
            with files[number].open("rb") as file:
                yield from _samples(file, files[number], number)

    return Found(
        shards=shards,
        splits={
            split: lambda numbers=numbers: entries(numbers)  # type: ignore[misc]
            for split, numbers in by_split.items()
        },
        class_names=None,
        names_of_shards=[_class_names(file, root) for file in files],
        total_bytes=sum(shard.size for shard in shards),
    )


def _class_names(tar: Path, root: Path) -> list[str] | None:
    """The names beside a tar, or in the nearest folder around it up to the root.

    A name a line; empty ones at the end are none.
    """
    around = [folder for folder in tar.parents if folder.is_relative_to(root)]
    beside = (folder / CLASSES_FILE for folder in around)
    file = next((each for each in beside if each.is_file()), None)
    if file is None:
        return None
    try:
        names = file.read_text(encoding="utf-8").rstrip().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8: {error.reason} at byte {error.start}") from None
    if "" in map(str.strip, names):
        line = [name.strip() for name in names].index("") + 1
        raise DataError(f"{file}: line {line} is empty, and no name of a class")
    return names


def _samples(file: BinaryIO, path: Path, shard: int) -> Iterator[Entry]:
    """The images with their classes; the members of a sample stand together."""
    sample, image, label = None, None, None
    for member in members(file, path):
        folder, _, name = member.name.rpartition("/")
        stem, _, ending = name.partition(".")
        key = f"{folder}/{stem}"
        if key != sample:
            if image is not None:
                yield _entry(image, label, path, shard)
            sample, image, label = key, None, None
        ending = ending.lower()
        if f".{ending.rpartition('.')[2]}" in IMAGE_SUFFIXES:
            if image is not None:
                raise DataError(
                    f"{path}: {member.name}: is a second image of its sample, beside {image.name}; "
                    f"one is allowed"
                )
            image = member
        elif ending in CLASS_KEYS:
            file.seek(member.offset)
            label = _number(file.read(member.size), path, member.name)
        elif ending == "json" and label is None:
            file.seek(member.offset)
            label = _from_json(file.read(member.size), path, member.name)
    if image is not None:
        yield _entry(image, label, path, shard)


def _entry(image: Member, label: int | None, path: Path, shard: int) -> Entry:
    if label is None:
        raise DataError(
            f"{path}: {image.name}: has no class: a member of that name with .cls, or a .json with "
            f"one of the keys {', '.join(CLASS_KEYS)}, is needed"
        )
    return Entry(shard, image.offset, image.size, label, image.name)


def _number(content: bytes, path: Path, name: str) -> int:
    try:
        return int(content.decode("ascii").strip())
    except ValueError:
        raise DataError(f"{path}: {name}: holds no number of a class") from None


def _from_json(content: bytes, path: Path, name: str) -> int | None:
    try:
        tree = json.loads(content)
    except ValueError:
        raise DataError(f"{path}: {name}: is not JSON") from None
    found = [tree[key] for key in CLASS_KEYS if isinstance(tree, dict) and key in tree]
    return found[0] if found and type(found[0]) is int else None
