"""Parquet files of Hugging Face's: a column of images {bytes, path}, and one of labels, or columns
of true and false, which are attributes (as of flwrlabs/celeba).

Where image bytes are stored uncompressed and one after the other (as `datasets` 5 writes them),
their places in the file follow from the headers of pages and the lengths before them, and each
image is read alone. Otherwise a whole row group has to be read at once.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data.class_names import named_classes
from data.errors import DataError, listed
from data.images.shards import Entry, Kind, Shard
from data.images.sources.found import Found, split_of

LABELS = ("label", "fine_label", "labels", "class")
"""Columns that hold the class, the first that is there: CIFAR-100 has fine and coarse ones."""
IMAGES = ("image", "img")
HEADER_BYTES = 8192
"""Bytes that the header of a page is looked for in; statistics of images may make it long."""


class Columns(NamedTuple):
    """Which columns of a file hold what."""

    image: str
    label: str | None
    """None: there are attributes."""
    attributes: tuple[str, ...]


class Group(NamedTuple):
    """What a row group says of its images."""

    number: int
    labels: list[int]
    paths: list[Any]
    attributes_NK: npt.NDArray[np.uint8] | None

    def entry(self, row: int, shard: int, place: tuple[int, int], name: str) -> Entry:
        """An image of the group.

        Args:
            row: In the group.
            shard: The file.
            place: What stands for offset and size.
            name: If it has no path.
        """
        attributes = None if self.attributes_NK is None else self.attributes_NK[row]
        return Entry(shard, *place, self.labels[row], self.paths[row] or name, attributes)


def open_parquet(path: Path) -> Found:
    """Opens a file, or a folder of files whose names begin with those of splits.

    Raises:
        DataError: There is none, or columns are missing.
    """
    import pyarrow.parquet

    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    schemas = []
    for file in files:
        try:
            schemas.append(pyarrow.parquet.read_schema(file))
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file}: cannot be read as parquet: {str(error)[:120]}") from None
        columns = _columns(schemas[-1], file)
    label = columns.label
    of_each = [named_classes(schema.metadata, label) for schema in schemas] if label else []
    image = columns.image
    kinds = {number: _kind(file, f"{image}.bytes") for number, file in enumerate(files)}
    shards = [
        Shard(path=str(file.resolve()), kind=kinds[n], size=file.stat().st_size, column=image)
        for n, file in enumerate(files)
    ]
    by_split: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        by_split.setdefault(split_of(file, path), []).append(number)

    def entries(numbers: list[int]) -> Iterator[Entry]:
        for number in numbers:
            grouped = kinds[number] == "parquet"
            try:
                yield from (_grouped if grouped else _ranges)(files[number], number, columns)
            except (pyarrow.ArrowException, OSError) as error:
                said = str(error)[:120]
                raise DataError(f"{files[number]}: cannot be read as parquet: {said}") from None

    return Found(
        shards=shards,
        splits={
            split: lambda numbers=numbers: entries(numbers)  # type: ignore[misc]
            for split, numbers in by_split.items()
        },
        class_names=None if label else list(columns.attributes),
        names_of_shards=of_each,
        has_attributes=label is None,
        grouped=frozenset(
            split
            for split, numbers in by_split.items()
            if any(kinds[number] == "parquet" for number in numbers)
        ),
        total_bytes=sum(shard.size for shard in shards),
    )


def _columns(schema: Any, file: Path) -> Columns:
    names = list(schema.names)
    image = next((name for name in IMAGES if name in names), None)
    label = next((name for name in LABELS if name in names), None)
    attributes = tuple(name for name in names if str(schema.field(name).type) == "bool")
    for column, what, wanted in (
        (image, "images", " or ".join(IMAGES)),
        (label or attributes, "labels", f"{' or '.join(LABELS)}, and none of true and false"),
    ):
        if not column:
            raise DataError(f"{file}: has no column of {what}, {wanted}; it has {listed(names)}")
    assert image is not None
    return Columns(image, label, () if label else attributes)


def _kind(file: Path, column: str) -> Kind:
    """range, if every image stands in the file as it is; else parquet."""
    import pyarrow.parquet

    about = pyarrow.parquet.read_metadata(file)
    for group in range(about.num_row_groups):
        chunk = _chunk(about.row_group(group), column)
        if chunk.compression != "UNCOMPRESSED" or chunk.has_dictionary_page:
            return "parquet"
        if chunk.statistics is not None and chunk.statistics.null_count:
            return "parquet"
    return "range"


def _chunk(group: Any, column: str) -> Any:
    for number in range(group.num_columns):
        if group.column(number).path_in_schema == column:
            return group.column(number)
    raise DataError(f"parquet: has no column {column}")


def _groups(file: Path, columns: Columns) -> Iterator[Group]:
    """Of each row group the labels and the names of its images."""
    import pyarrow.parquet

    opened = pyarrow.parquet.ParquetFile(file)
    path = f"{columns.image}.path"
    has_path = any(
        opened.metadata.row_group(0).column(n).path_in_schema == path
        for n in range(opened.metadata.row_group(0).num_columns)
    ) if opened.num_row_groups else False  # fmt: skip
    wanted = [columns.label] if columns.label else list(columns.attributes)
    for group in range(opened.num_row_groups):
        table = opened.read_row_group(group, columns=[*wanted, *([path] if has_path else [])])
        paths = [None] * len(table)
        if has_path:
            paths = table[columns.image].combine_chunks().field("path").to_pylist()
        if columns.label is None:
            rows = [table[name].to_pylist() for name in columns.attributes]
            yield Group(group, [0] * len(table), paths, _bits(file, columns.attributes, rows))
        else:
            yield Group(group, _numbers(file, columns.label, table), paths, None)


def _bits(file: Path, names: tuple[str, ...], columns: list[list[Any]]) -> npt.NDArray[np.uint8]:
    for name, values in zip(names, columns, strict=True):
        if None in values:
            raise DataError(f"{file}: row {values.index(None)} of a group has no {name}")
    return np.array(columns, dtype=np.uint8).T


def _numbers(file: Path, label: str, table: Any) -> list[int]:
    values = table[label].to_pylist()
    strange = next((v for v in values if v is not None and not isinstance(v, int)), None)
    if strange is not None:
        raise DataError(
            f"{file}: the label {strange!r} in the column {label} is no number of a class"
        )
    return [-1 if value is None else value for value in values]


def _grouped(file: Path, shard: int, columns: Columns) -> Iterator[Entry]:
    first = 0
    for group in _groups(file, columns):
        for row in range(len(group.labels)):
            yield group.entry(row, shard, (group.number, row), f"row {first + row}")
        first += len(group.labels)


def _ranges(file: Path, shard: int, columns: Columns) -> Iterator[Entry]:
    places = byte_ranges(file, f"{columns.image}.bytes")
    first = 0
    for group in _groups(file, columns):
        for row in range(len(group.labels)):
            yield group.entry(row, shard, next(places), f"row {first + row}")
        first += len(group.labels)


def byte_ranges(file: Path, column: str) -> Iterator[tuple[int, int]]:
    """Where the values of an uncompressed column of bytes stand in a parquet file.

    A page has a header in Thrift's compact protocol, definition levels, and then the values: each
    its length in 4 bytes, and its bytes (Parquet's encoding PLAIN). Only lengths are read.

    Args:
        file: The file.
        column: Its path in the schema; without nulls, dictionary and compression.

    Yields:
        Offset and size of each value.

    Raises:
        DataError: A page is of another kind, or its values do not fill it.
    """
    import pyarrow.parquet

    about = pyarrow.parquet.read_metadata(file)
    levels = {
        about.schema.column(n).path: about.schema.column(n).max_definition_level
        for n in range(len(about.schema))
    }
    has_levels = levels.get(column, 0) > 0  # a column that cannot be null has none
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for group in range(about.num_row_groups):
            chunk = _chunk(about.row_group(group), column)
            at, left = chunk.data_page_offset, chunk.num_values
            while left:
                head = os.pread(descriptor, HEADER_BYTES, at)
                try:
                    page, header_size = _Compact(head).read_struct()
                except (IndexError, DataError):
                    raise DataError(
                        f"{file}: the header of the page at byte {at:,} is damaged"
                    ) from None
                begin = at + header_size
                end = begin + page[3]  # the compressed size, which is the real one
                count, value = _page(page, descriptor, begin, file, has_levels=has_levels)
                for _ in range(count if value < end else 0):
                    length = os.pread(descriptor, 4, value)
                    size = int.from_bytes(length, "little")
                    yield value + 4, size
                    value += 4 + size
                if value != end:
                    raise DataError(f"{file}: the page at byte {at:,} holds other than its values")
                at, left = end, left - count
    finally:
        os.close(descriptor)


def _page(
    page: dict[int, Any], descriptor: int, begin: int, file: Path, *, has_levels: bool
) -> tuple[int, int]:
    """The number of values of a page, and where they begin."""
    if page.get(1) == 0 and page[5][2] == 0:  # a data page of version 1, PLAIN
        if not has_levels:
            return page[5][1], begin
        levels = int.from_bytes(os.pread(descriptor, 4, begin), "little")
        return page[5][1], begin + 4 + levels
    if page.get(1) == 3 and page[8][4] == 0:  # of version 2: lengths of levels are in the header
        return page[8][1], begin + page[8][5] + page[8][6]
    raise DataError(f"{file}: has a page of an unknown kind before byte {begin:,}")


class _Compact:
    """Reads Thrift's compact protocol, as far as headers of pages need it.

    Args:
        data: Begins with a struct.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read_struct(self) -> tuple[dict[int, Any], int]:
        """The fields of the struct by their numbers, and how many bytes it has."""
        return self._struct(), self._at

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        result, shift = 0, 0
        while True:
            byte = self._byte()
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result
            shift += 7

    def _integer(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def _struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self._integer()
            fields[number] = self._value(head & 0x0F)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):  # true, false
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 7:  # a double
            self._at += 8
            return None
        if kind == 8:
            size = self._varint()
            self._at += size
            return self._data[self._at - size : self._at]
        if kind in (9, 10):  # list, set
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 0x0F) for _ in range(count)]
        if kind == 12:
            return self._struct()
        raise DataError(f"parquet: unknown type {kind} in the header of a page")
