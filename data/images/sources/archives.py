"""The one reader of archives: where each member of a zip or a tar is, without reading members.

Names, numbers and sizes in an archive are anybody's: what lies outside of the file, or is larger
than headers and labels are, is refused before it is read.
"""

import io
import re
import stat
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from polyad.data.errors import DataError
from polyad.data.images.shards import Shard
from polyad.data.images.sources.trees import ArchiveTree, File, Tree
from polyad.data.left_out import LeftOut

MOST_HEADER = 1 << 16
"""Bytes of a long name, or of further keys, in a tar."""
MOST_DIGITS = re.compile(rb"\d{1000}")
"""More digits than any number in a header has; Python reads no number of more than 4,300."""
MOST_LINK = 4096
"""Bytes of a path that a link in a zip holds."""
READABLE = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def read_zip(path: Path, left_out: LeftOut) -> Tree:
    """The files and folders of a zip.

    Stored members are bytes of shard 0, those of shard 1 are compressed.

    Raises:
        DataError: It is no zip, or damaged.
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
    """The files and folders of a tar, in their order; all are bytes of shard 0.

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
            left_out.add("members with holes", member.name)
        elif member.isfile():
            tree.add_file(File(parts, member.size, 0, member.offset_data, member.name))
        else:
            left_out.add("pipes, sockets and devices", member.name)
    return tree.tree()


def tar_members(path: Path) -> Iterator[tarfile.TarInfo]:
    """The members of a tar, one after the other.

    Raises:
        DataError: A header is damaged, or the file ends too early, or goes on behind its end.
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
                raise DataError(f"{path}: is empty, and no tar") from None
            raise DataError(_damaged(path, at, error)) from None
    _check_end(path, archive.offset)


def _damaged(path: Path, at: int, reason: object) -> str:
    said = " ".join(str(reason).split())[:80]
    return f"{path}: the header at byte {at:,} is damaged, or one behind it: {said}"


def _check_end(path: Path, at: int) -> None:
    """Checks that a tar ends with zeros: `tarfile` takes a damaged header for its end."""
    with path.open("rb") as file:
        file.seek(at)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise DataError(f"{path}: the header at byte {at:,} is damaged")
        while block := file.read(1 << 20):
            if block.count(0) != len(block):
                raise DataError(
                    f"{path}: goes on behind its end at byte {at:,}: were tars joined? Unpack it, "
                    f"and name the folder, or name a folder of the single tars"
                )


class _Headers(io.FileIO):
    """A tar, of which headers are read, and no members."""

    def read(self, size: int | None = -1) -> bytes:
        """Reads a header, or names and keys that stand behind one."""
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
