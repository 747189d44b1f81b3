"""Archives: locates the members of a zip or a tar without reading them; and WebDataset.

Names, numbers and sizes in an archive are untrusted: anything outside of the file, or larger than
headers and labels can be, is refused before it is read.

WebDataset is tar files in which members with the same base name form a sample, such as 000.jpg
with 000.cls. A tar without classes in it is a tree of folders, as a zip is.
"""

import io
import itertools
import re
import stat
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from polyad.data.errors import DataError, one_line
from polyad.data.images.shards import Entry, Shard
from polyad.data.images.sources.classes import by_class
from polyad.data.images.sources.found import (
    ArchiveTree,
    File,
    Found,
    Tree,
    files_by_split,
    is_image,
)
from polyad.data.json_reader import parse_json, read_bounded
from polyad.data.prepared import LeftOut

MOST_HEADER = 1 << 16
"""Maximum size of a long name, or of extra keys, in a tar, in bytes."""
MOST_DIGITS = re.compile(rb"\d{1000}")
"""More digits than any number in a header has; Python parses at most 4,300."""
MOST_LINK = 4096
"""Maximum length of the path that a link in a zip holds, in bytes."""
READABLE = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def read_zip(path: Path, left_out: LeftOut) -> Tree:
    """Lists the files and folders of a zip.

    Stored members are byte ranges of shard 0; compressed ones are members of shard 1.

    Raises:
        DataError: It is not a zip, or is damaged.
    """
    end = path.stat().st_size
    shards = [Shard(path=str(path.resolve()), kind=kind, size=end) for kind in ("range", "zip")]
    tree = ArchiveTree(path, shards, left_out)
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                parts = tree.parts_of(member.filename)
                if parts is None:
                    continue
                if member.is_dir():
                    tree.add_folder(parts)
                elif stat.S_ISLNK(member.external_attr >> 16):
                    tree.add_link(parts, _link_in(archive, member), hard=False)
                else:
                    tree.add_file(_zip_file(file, member, parts, path, end))
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be read as a zip file: {error}") from None
    return tree.tree()


def _link_in(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    with archive.open(member) as file:
        return file.read(MOST_LINK).decode("utf-8", "replace")


def _zip_file(
    file: BinaryIO, member: zipfile.ZipInfo, parts: tuple[str, ...], path: Path, end: int
) -> File:
    name = member.filename
    if member.flag_bits & 1:
        raise DataError(f"{path}: {name}: is encrypted; unpack the archive, and name the folder")
    if member.compress_type not in READABLE:
        raise DataError(
            f"{path}: {name}: is compressed in a way that Python does not read "
            f"({member.compress_type}); unpack the archive, and name the folder"
        )
    header = b""
    if 0 <= member.header_offset < end:
        file.seek(member.header_offset)
        header = file.read(30)
    if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
        raise DataError(f"{path}: {name}: its header is damaged")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    offset = member.header_offset + 30 + int(name_length) + int(extra_length)
    if offset + member.compress_size > end:
        raise DataError(f"{path}: {name}: the file ends before this member does")
    if member.compress_type != zipfile.ZIP_STORED:
        return File(parts, member.file_size, 1, 0, name)
    if member.file_size != member.compress_size:
        raise DataError(f"{path}: {name}: its header is damaged: it has two sizes")
    return File(parts, member.file_size, 0, offset, name)


def read_tar(path: Path, left_out: LeftOut) -> Tree:
    """Lists the files and folders of a tar in order; all files are byte ranges of shard 0.

    Raises:
        DataError: It is damaged.
    """
    shards = [Shard(path=str(path.resolve()), kind="range", size=path.stat().st_size)]
    tree = ArchiveTree(path, shards, left_out)
    for member in tar_members(path):
        parts = tree.parts_of(member.name)
        if parts is None:
            continue
        if member.isdir():
            tree.add_folder(parts)
        elif member.islnk() or member.issym():
            tree.add_link(parts, member.linkname, hard=member.islnk())
        elif member.issparse():
            left_out.add("members stored as sparse files", member.name)
        elif member.isfile():
            tree.add_file(File(parts, member.size, 0, member.offset_data, member.name))
        else:
            left_out.add("pipes, sockets and devices", member.name)
    return tree.tree()


def tar_members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Yields the members of a tar in order.

    Raises:
        DataError: A header is damaged, the file is truncated, or data follows its end.
    """
    end = path.stat().st_size
    at = 0
    with _Headers(path) as file:
        try:
            archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # or all are kept
                if member.size < 0 or member.offset < at or member.offset_data < member.offset:
                    raise tarfile.ReadError("a number in it is below 0")
                whole = member.isreg() and not member.issparse()
                if whole and member.offset_data + member.size > end:
                    raise DataError(f"{path}: {member.name}: the file ends before this member does")
                yield member
                at = member.offset + tarfile.BLOCKSIZE
                if archive.offset > end:
                    raise DataError(f"{path}: {member.name}: the file ends before this member does")
        except (tarfile.TarError, ValueError, OSError, OverflowError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            if end == 0:
                raise DataError(f"{path}: is empty, so it is not a tar") from None
            raise DataError(
                f"{path}: the header at byte {at:,} is damaged, or one behind it: "
                f"{one_line(error, 80)}"
            ) from None
    _check_end(path, archive.offset)


def _check_end(path: Path, at: int) -> None:
    """Checks that a tar ends with zeros: `tarfile` takes a damaged header for the end."""
    with path.open("rb") as file:
        file.seek(at)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise DataError(f"{path}: the header at byte {at:,} is damaged")
        while block := file.read(1 << 20):
            if block.count(0) != len(block):
                raise DataError(
                    f"{path}: continues after its end at byte {at:,}: were several tars joined? "
                    "Unpack it and name the folder, or name a folder with the single tars"
                )


class _Headers(io.FileIO):
    """A tar of which only headers are read, never members."""

    def read(self, size: int | None = -1) -> bytes:
        """Reads a header, or the names and keys that follow one."""
        at, size = self.tell(), -1 if size is None else size
        damaged = f"{self.name}: the header at byte {at:,} is damaged"
        if not 0 <= size <= MOST_HEADER:
            raise DataError(
                f"{damaged}: it says that {size:,} bytes of names and keys follow, and "
                f"{MOST_HEADER:,} are allowed"
            )
        content = super().read(size) or b""
        if size > tarfile.BLOCKSIZE and MOST_DIGITS.search(content):
            raise DataError(f"{damaged}: it has a number of more than 1,000 digits")
        return content


CLASS_KEYS = ("cls", "label", "class")
"""Extensions of members, or keys of a `.json`, that hold the class."""
CLASSES_FILE = "classes.txt"
"""A file beside the tars, or in a parent folder: the class names, one per line."""
MOST_LABEL, MOST_JSON = 1 << 10, 1 << 24
"""Maximum size of a member that holds a class, and of a `.json`, in bytes."""
LOOKED_AT = 1000
"""Number of members from which the kind of a tar is recognized."""


@dataclass
class _Sample:
    """The members with the same base name."""

    image: File | None = None
    label: int | None = None
    first: str = ""
    """One of its members."""


def open_tars(files: list[Path], root: Path, left_out: LeftOut) -> Found:
    """Opens tars; the split is taken from the name of the tar or its folder, else it is train.

    Raises:
        DataError: A tar is damaged.
    """
    if len(files) == 1 and not _has_classes(files[0]):
        tree = read_tar(files[0], left_out)
        images = [file for file in tree.files if is_image(file.name)]
        if images and all(len(file.parts) == 1 for file in images):
            raise _without_class(files[0], images[0].name)
        return by_class(tree, left_out)
    by_split = files_by_split(files, root, left_out)
    folder = root if root.is_dir() else root.parent
    names = [_class_names(file, folder) for file in files]
    shards = [
        Shard(path=str(file.resolve()), kind="range", size=file.stat().st_size) for file in files
    ]

    def entries(numbers: list[int]) -> Iterator[Entry]:
        for number in numbers:
            yield from _samples(files[number], number, names[number], left_out)

    return Found(
        shards=shards,
        splits={split: partial(entries, numbers) for split, numbers in by_split.items()},
        class_names=None,
        names_of_shards=names,
        left_out=left_out,
        total_bytes=sum(shard.size for shard in shards),
    )


def _has_classes(path: Path) -> bool:
    """Returns whether members hold classes, judging by the first ones; else folders do."""
    return any(
        _ending(member.name) in (*CLASS_KEYS, "json")
        for member in itertools.islice(tar_members(path), LOOKED_AT)
    )


def _ending(name: str) -> str:
    """Returns what follows the first dot of a member's name, in lower case."""
    return name.rpartition("/")[2].partition(".")[2].lower()


def _class_names(tar: Path, root: Path) -> list[str] | None:
    """Reads the class names beside a tar, or in the nearest parent folder up to the root.

    One name per line; empty lines at the end are ignored.
    """
    around = [folder for folder in tar.parents if folder.is_relative_to(root)]
    beside = (folder / CLASSES_FILE for folder in around)
    file = next((each for each in beside if each.is_file()), None)
    if file is None:
        return None
    try:
        names = read_bounded(file).decode("utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8: {error.reason} at byte {error.start}") from None
    if "" in map(str.strip, names):
        line = [name.strip() for name in names].index("") + 1
        raise DataError(f"{file}: line {line} is empty; it must be the name of a class")
    return names


def _samples(
    path: Path, shard: int, names: Sequence[str] | None, left_out: LeftOut
) -> Iterator[Entry]:
    """Yields the images with their classes, ordered by the first members of their samples."""
    samples: dict[str, _Sample] = {}
    with path.open("rb") as opened:
        for file in read_tar(path, left_out).files:
            stem = file.parts[-1].partition(".")[0]
            sample = samples.setdefault("/".join((*file.parts[:-1], stem)), _Sample())
            sample.first = sample.first or file.name
            _add(sample, file, path, opened, names, left_out)
    for sample in samples.values():
        image, label = sample.image, sample.label
        if image is None:
            left_out.add("samples without an image", f"{path.name}: {sample.first}")
        elif label is None:
            raise _without_class(path, image.name)
        else:
            yield Entry(shard, image.offset, image.size, label, image.name)


def _without_class(path: Path, name: str) -> DataError:
    return DataError(
        f"{path}: {name}: has no class: a member of that name with .cls, or a .json with one of "
        f"the keys {', '.join(CLASS_KEYS)}, is needed, or a tar alone with a folder for each class"
    )


def _add(
    sample: _Sample,
    file: File,
    path: Path,
    opened: BinaryIO,
    names: Sequence[str] | None,
    left_out: LeftOut,
) -> None:
    """Adds a member to its sample."""
    ending = _ending(file.name)
    place = f"{path}: {file.name}"
    if is_image(file.name):
        if sample.image is not None:
            raise DataError(
                f"{place}: is a second image of its sample, besides {sample.image.name}; only one "
                "is allowed"
            )
        sample.image = file
    elif ending in CLASS_KEYS:
        content = _content(opened, file, MOST_LABEL, place)
        label = _number(content.decode("utf-8", "replace").strip(), names, place)
        _give(sample, label, place)
    elif ending == "json":
        tree = parse_json(_content(opened, file, MOST_JSON, place), place)
        found = [tree[key] for key in CLASS_KEYS if isinstance(tree, dict) and key in tree]
        if found and (sample.label is None or type(found[0]) is int):
            _give(sample, _number(found[0], names, place), place)
    else:
        why = f"members that end in .{ending}" if ending else "members without an ending"
        left_out.add(why, file.name, mistake=False)


def _give(sample: _Sample, label: int, place: str) -> None:
    """Sets a sample's class, which several members may hold."""
    if sample.label not in (None, label):
        raise DataError(
            f"{place}: has the class {label}, but another member of the sample has {sample.label}"
        )
    sample.label = label


def _content(opened: BinaryIO, file: File, most: int, place: str) -> bytes:
    if file.size > most:
        raise DataError(f"{place}: has {file.size:,} bytes, but a class may have at most {most:,}")
    opened.seek(file.offset)
    return opened.read(file.size)


def _number(label: object, names: Sequence[str] | None, place: str) -> int:
    """Returns the number of a class given as a number, as text, or by its name in `classes.txt`."""
    if type(label) is int:
        return label
    if isinstance(label, str) and len(label) < 20 and label.removeprefix("-").isdecimal():
        return int(label)
    if isinstance(label, str) and names is not None and label in names:
        return names.index(label)
    known = f"; {CLASSES_FILE} does not have it" if names else f", nor is there a {CLASSES_FILE}"
    raise DataError(f"{place}: does not hold the number of a class: {str(label)[:40]!r}{known}")
