"""A folder for each class, below a folder for each split or alone: of files, or in a zip."""

import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from data.errors import DataError, listed
from data.images.shards import Entry, Shard
from data.images.sources.found import IMAGE_SUFFIXES, SPLIT_NAMES, Found


def open_folder(root: Path) -> Found:
    """Opens folders of classes.

    Args:
        root: With `train`, `val` or `validation`, and `test`, or with the classes themselves.

    Raises:
        DataError: There are no folders of classes, or splits have other classes.
    """
    root = root.resolve()
    below = {entry.name: entry for entry in root.iterdir() if is_folder(entry)}
    splits = split_folders(below)
    if splits:
        flat = not any(map(is_folder, below[splits["train"]].iterdir()))
        splits = {} if flat and _has_others(below, splits) else splits
    places = {split: below[name] for split, name in splits.items()} or {"train": root}
    classes = {
        split: sorted(entry.name for entry in place.iterdir() if is_folder(entry))
        for split, place in places.items()
    }
    names = _same_classes(str(root), classes)
    number = {name: label for label, name in enumerate(names)}
    shards = [Shard(path=str(place), kind="folder") for place in places.values()]

    def entries(shard: int, place: Path) -> Iterator[Entry]:
        for name in names:
            for file, size in folder_images(place / name):
                yield Entry(shard, 0, size, number[name], f"{name}/{file}")

    return Found(
        shards=shards,
        splits={
            split: lambda shard=shard, place=place: entries(shard, place)  # type: ignore[misc]
            for shard, (split, place) in enumerate(places.items())
        },
        class_names=names,
    )


def open_zip(path: Path) -> Found:
    """Opens folders of classes in a zip file, stored or compressed.

    Raises:
        DataError: It is no zip, or has no folders of classes.
    """
    members = zip_images(path)
    parts = {member.filename: PurePosixPath(member.filename).parts for member in members}
    depth = min((len(part) for part in parts.values()), default=0)
    if depth < 2:
        raise DataError(f"{path}: has no images in folders of classes")
    tops = {part[0] for part in parts.values()}
    around = len(tops) == 1 and not split_folders(tops)
    deepest = max(len(part) for part in parts.values())
    if around and depth == 2 < deepest:
        stray = next(name for name, part in parts.items() if len(part) == 2)
        raise DataError(f"{path}: {stray}: is not in a folder of a class, as other images are")
    if around and depth > 2:
        parts = {name: part[1:] for name, part in parts.items()}  # one folder around everything
        tops = {part[0] for part in parts.values()}
    found = split_folders(tops)
    flat = found and all(len(part) == 2 for part in parts.values() if part[0] == found["train"])
    if flat and not _has_others(tops, found):
        raise DataError(f"{path}: {found['train']} holds images, and no folders of classes")
    splits: Mapping[str, str | None] = {"train": None} if flat or not found else found
    chosen = {
        split: {
            name: part[0 if top is None else 1]
            for name, part in parts.items()
            if top is None or part[0] == top
        }
        for split, top in splits.items()
    }
    names = _same_classes(
        str(path), {split: sorted(set(each.values())) for split, each in chosen.items()}
    )
    number = {name: label for label, name in enumerate(names)}

    def entries(split: str) -> Iterator[Entry]:
        with path.open("rb") as file:
            for member in members:
                if member.filename in chosen[split]:
                    label = number[chosen[split][member.filename]]
                    yield zip_entry(file, member, path, label)

    return Found(
        shards=zip_shards(path),
        splits={split: lambda split=split: entries(split) for split in splits},  # type: ignore[misc]
        class_names=names,
        total_bytes=sum(member.file_size for member in members),
    )


def zip_images(path: Path) -> list[zipfile.ZipInfo]:
    """The images in a zip file, by their names.

    Raises:
        DataError: It is no zip.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if is_image(m.filename)]
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path}: cannot be read as a zip file: {error}") from None
    return sorted(members, key=lambda m: m.filename)


def zip_shards(path: Path) -> list[Shard]:
    """A zip file as the shards that `zip_entry` means: of stored images, and of compressed ones."""
    size = path.stat().st_size
    return [
        Shard(path=str(path.resolve()), kind="range", size=size),
        Shard(path=str(path.resolve()), kind="zip", size=size),
    ]


def zip_entry(
    file: BinaryIO, member: zipfile.ZipInfo, path: Path, label: int, domain: int | None = None
) -> Entry:
    """An image of a zip file.

    Args:
        file: The zip, open.
        member: The image.
        path: Of the zip, for errors.
        label: Its class.
        domain: Its domain, if there are any.

    Raises:
        DataError: Its header is damaged.
    """
    name, size = member.filename, member.file_size
    if member.compress_type == zipfile.ZIP_STORED:
        return Entry(0, _stored_at(file, member, path), size, label, name, domain=domain)
    return Entry(1, 0, size, label, name, domain=domain)


def folder_images(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes of the images in a folder, and in folders below it, by their names."""
    found = []
    for place, below, names in os.walk(folder):
        below[:] = [name for name in below if not name.startswith(".")]
        images = (Path(place) / name for name in names if is_image(name))
        try:
            found += [(file.relative_to(folder).as_posix(), file.stat().st_size) for file in images]
        except OSError as error:  # as a link to nothing
            raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return sorted(found)


def _stored_at(file: BinaryIO, member: zipfile.ZipInfo, path: Path) -> int:
    """Where the bytes of a stored member begin: after its local header."""
    file.seek(member.header_offset)
    header = file.read(30)
    if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
        raise DataError(f"{path}: {member.filename}: its header is damaged")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return member.header_offset + 30 + int(name_length) + int(extra_length)


def is_folder(entry: Path) -> bool:
    """Whether this is a folder that is not hidden."""
    return entry.is_dir() and not entry.name.startswith(".")


def is_image(name: str) -> bool:
    """Whether a file's name is an image's, and not hidden."""
    path = PurePosixPath(name)
    hidden = path.name.startswith(".") or "__MACOSX" in name
    return path.suffix.lower() in IMAGE_SUFFIXES and not hidden


def split_folders(below: Iterable[str]) -> dict[str, str]:
    """The folder of each split, if any folder is called like one."""
    found: dict[str, str] = {}
    for name in sorted(below):
        split = SPLIT_NAMES.get(name.lower())
        if split is not None and split not in found:
            found[split] = name
    return found if "train" in found else {}


def _has_others(below: Iterable[str], splits: Mapping[str, str]) -> bool:
    """Whether other folders stand beside those of splits: a `train` that holds no folders is then a
    class, as of vehicles."""
    return bool(set(below) - set(splits.values()))


def _same_classes(place: str, classes: dict[str, list[str]]) -> list[str]:
    """The classes, which have to be those of every split."""
    names = classes["train"]
    if not names:
        raise DataError(f"{place}: has no folders of classes with images")
    for split, others in classes.items():
        missing, more = sorted(set(names) - set(others)), sorted(set(others) - set(names))
        if more or missing:
            which = f"has {listed(more, 3)} more" if more else f"lacks {listed(missing, 3)}"
            raise DataError(
                f"{place}: its {split} split {which}: the classes of all splits have to be the same"
            )
    return names
