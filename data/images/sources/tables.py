"""Tables of images in Hugging Face's formats: Arrow files, as saved by `datasets`, and Parquet.

A column of images holds structs {bytes, path}, as `datasets` writes them, or bytes; labels are in
another column, or in boolean columns, which are attributes (as in flwrlabs/celeba). Images are
copied into a file of the prepared folder.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, listed, one_line
from polyad.data.images.shards import Entry, Packed, Shard
from polyad.data.images.sources.found import Found, files_by_split
from polyad.data.names import named_classes, schema_of
from polyad.data.prepared import LeftOut

LABELS = ("label", "fine_label", "labels", "class")
"""Columns that may hold the class, in order of preference: CIFAR-100 has fine and coarse ones."""
IMAGES = ("image", "img")


class Columns(NamedTuple):
    """The roles of a file's columns."""

    image: str
    has_path: bool
    """Whether an image is a struct with a path."""
    is_struct: bool
    label: str | None
    """The column of labels; None if there are attributes."""
    attributes: tuple[str, ...]

    @property
    def wanted(self) -> list[str]:
        """The columns, and fields of columns, that are read."""
        parts = [f"{self.image}.bytes"] if self.is_struct else [self.image]
        paths = [f"{self.image}.path"] if self.has_path else []
        return [*parts, *paths, *([self.label] if self.label else self.attributes)]


def columns_of(schema: Any, file: Path) -> Columns:
    """Finds the columns of images and of labels, or of attributes (booleans).

    Raises:
        DataError: They are missing, or have another type.
    """
    import pyarrow.types as kinds

    names = names_in(schema, file)
    image = next((name for name in IMAGES if name in names), None)
    label = next((name for name in LABELS if name in names), None)
    attributes = tuple(name for name in names if kinds.is_boolean(schema.field(name).type))
    for column, what, wanted in (
        (image, "images", " or ".join(IMAGES)),
        (label or attributes, "labels", f"{' or '.join(LABELS)}, and none of true and false"),
    ):
        if not column:
            raise DataError(f"{file}: has no column of {what}, {wanted}; it has {listed(names)}")
    assert image is not None
    used = [image, *([label] if label else attributes)]
    twice = next((name for name in used if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{file}: has two columns named {twice}")
    kind = schema.field(image).type
    inside = {kind.field(n).name: kind.field(n).type for n in range(kind.num_fields)}
    is_struct = kinds.is_struct(kind) and "bytes" in inside
    if not _is_bytes(inside["bytes"] if is_struct else kind):
        raise DataError(
            f"{file}: the column {image} holds {kind}, not images: it must hold bytes, or structs "
            "of bytes and path; if it holds only paths, name the folder of the files instead"
        )
    of_labels = schema.field(label).type if label else None
    if label and not (kinds.is_integer(of_labels) or kinds.is_boolean(of_labels)):
        raise DataError(f"{file}: the column {label} holds {of_labels}, not numbers of classes")
    has_path = is_struct and "path" in inside and _is_text(inside["path"])
    return Columns(image, has_path, is_struct, label, () if label else attributes)


def names_in(schema: Any, file: Path) -> list[str]:
    """Returns the names of the columns.

    Raises:
        DataError: A name is not text.
    """
    try:
        return list(schema.names)
    except UnicodeDecodeError:
        raise DataError(f"{file}: the name of a column is not UTF-8") from None


def _is_bytes(kind: Any) -> bool:
    import pyarrow.types as kinds

    if kinds.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        kinds.is_binary(kind)
        or kinds.is_large_binary(kind)
        or kinds.is_binary_view(kind)
        or kinds.is_fixed_size_binary(kind)
    )


def _is_text(kind: Any) -> bool:
    import pyarrow.types as kinds

    if kinds.is_dictionary(kind):
        kind = kind.value_type
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind))


def entries_of(
    batch: Any, columns: Columns, file: Path, first: int, shard: int, found: Found
) -> Iterator[Entry]:
    """Yields the images of a batch of rows.

    Args:
        batch: An Arrow batch.
        columns: The columns of the file.
        file: The file, for errors.
        first: The number of its first row.
        shard: The number of its shard.
        found: Receives the images, and counts rows without one.
    """
    import pyarrow.compute as compute

    images = batch.column(columns.image)
    paths: list[bytes | None] = [None] * len(batch)
    if columns.has_path:
        paths = _paths(compute.struct_field(images, "path"))
    if columns.is_struct:
        images = compute.struct_field(images, "bytes")
    contents = images.to_pylist()
    labels, attributes = [0] * len(batch), None
    if columns.label is None:
        attributes = _bits(batch, columns, file, first)
    else:
        known = batch.column(columns.label).to_pylist()
        labels = [-1 if number is None else int(number) for number in known]
    for row, (content, path) in enumerate(zip(contents, paths, strict=True)):
        name = os.fsdecode(path or b"") or f"row {first + row}"
        if content is None:
            why = "with the path of an image but without its bytes" if path else "without an image"
            found.left_out.add(f"rows {why}")
            continue
        bits = None if attributes is None else attributes[row]
        assert found.packed is not None
        yield Entry(shard, found.packed.add(content), len(content), labels[row], name, bits)


def _paths(column: Any) -> list[bytes | None]:
    """Returns paths as bytes, since a file may hold invalid UTF-8."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    paths: list[bytes | None] = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    return paths


def _bits(batch: Any, columns: Columns, file: Path, first: int) -> npt.NDArray[np.uint8]:
    rows = [batch.column(name).to_pylist() for name in columns.attributes]
    for name, values in zip(columns.attributes, rows, strict=True):
        if None in values:
            raise DataError(f"{file}: row {first + values.index(None)} has no {name}")
    return np.array(rows, dtype=np.uint8).T


ROWS = 64
"""Rows converted to Python objects at a time: a row group may be as large as its file."""


def _found(
    files: list[Path],
    root: Path,
    folder: Path,
    left_out: LeftOut,
    read: Callable[[Path, int, Found], Iterator[Entry]],
    names: list[list[str] | None],
    attributes: list[str] | None = None,
) -> Found:
    """Describes tables as a source.

    Args:
        files: At least one.
        root: The file itself, or the folder of the files.
        folder: The folder that is being prepared.
        left_out: Counts rows without an image.
        read: Lists the images of a file, given its number.
        names: The class names of each file.
        attributes: Names of boolean columns; None if there is a column of labels.
    """
    packed = Packed(folder)

    def entries(numbers: list[int]) -> Iterator[Entry]:
        for number in numbers:
            yield from read(files[number], number, found)

    found = Found(
        shards=[
            Shard(path=str(packed.path), kind="range", source=str(file.resolve())) for file in files
        ],
        splits={
            split: partial(entries, numbers)
            for split, numbers in files_by_split(files, root).items()
        },
        class_names=attributes,
        names_of_shards=[] if attributes else names,
        has_attributes=attributes is not None,
        left_out=left_out,
        packed=packed,
        total_bytes=sum(file.stat().st_size for file in files),
    )
    return found


def open_arrow(files: list[Path], root: Path, folder: Path, left_out: LeftOut) -> Found:
    """Opens files of `save_to_disk`, or of the cache of `datasets`; see `_found`.

    Raises:
        DataError: They have no images with labels.
    """
    names = [_class_names(file) for file in files]
    return _found(files, root, folder, left_out, _arrow_entries, names)


def _class_names(file: Path) -> list[str] | None:
    schema = schema_of(file)
    present = names_in(schema, file)
    column = next((name for name in LABELS if name in present), None)
    return named_classes(schema, column) if column else None


def _arrow_entries(file: Path, shard: int, found: Found) -> Iterator[Entry]:
    import pyarrow as pa

    row = 0
    try:
        with pa.memory_map(str(file)) as mapped:
            whole = mapped.read_buffer()
            for batch in _batches(whole):
                columns = columns_of(batch.schema, file)
                for at in range(0, len(batch), ROWS):
                    part = batch.slice(at, ROWS)
                    for entry in entries_of(part, columns, file, row, shard, found):
                        yield entry._replace(name=Path(entry.name).name or entry.name)
                    row += len(part)
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{file}: cannot be read as Arrow: {one_line(error, 120)}") from None


def _batches(whole: Any) -> Iterator[Any]:
    import pyarrow as pa

    try:
        stream = pa.ipc.open_stream(whole)
    except pa.ArrowInvalid:
        opened = pa.ipc.open_file(whole)
        return (opened.get_batch(number) for number in range(opened.num_record_batches))
    return iter(stream)


def open_parquet(files: list[Path], root: Path, folder: Path, left_out: LeftOut) -> Found:
    """Opens files whose splits follow from their names or those of their folders; see `_found`.

    Raises:
        DataError: A file is not Parquet, or columns are missing.
    """
    import pyarrow.parquet

    columns: list[Columns] = []
    names: list[list[str] | None] = []
    for file in files:
        try:
            schema = pyarrow.parquet.read_schema(file)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{file}: cannot be read as parquet: {one_line(error, 120)}") from None
        columns.append(columns_of(schema, file))
        label = columns[-1].label
        names.append(named_classes(schema, label) if label else None)
    for file, each in zip(files, columns, strict=True):
        if each.attributes != columns[0].attributes:
            raise DataError(
                f"{file}: has the attributes {', '.join(each.attributes) or 'none'}, and "
                f"{files[0]} has {', '.join(columns[0].attributes) or 'none'}"
            )

    def read(file: Path, number: int, found: Found) -> Iterator[Entry]:
        return _parquet_entries(file, columns[number], number, found)

    return _found(files, root, folder, left_out, read, names, list(columns[0].attributes) or None)


def _parquet_entries(file: Path, columns: Columns, shard: int, found: Found) -> Iterator[Entry]:
    import pyarrow.parquet

    row = 0
    try:
        # Without these two, pyarrow holds all compressed bytes of a row group at once.
        with pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as opened:
            for batch in opened.iter_batches(ROWS, columns=columns.wanted, use_threads=False):
                yield from entries_of(batch, columns, file, row, shard, found)
                row += len(batch)
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{file}: cannot be read as parquet: {one_line(error, 120)}") from None
