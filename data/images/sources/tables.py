"""Tables of images as Hugging Face has them: Arrow files, as `datasets` saves them, and Parquet.

A column of images, which are read inside of the files where they stand there as they are; and one
of labels, or columns of true and false, which are attributes (as of flwrlabs/celeba).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyad.data.class_names import named_classes, names_of_feature, schema_of
from polyad.data.errors import DataError
from polyad.data.images.shards import Entry, Packed
from polyad.data.images.sources.columns import (
    LABELS,
    Columns,
    Places,
    columns_of,
    entries_of,
    names_in,
    table_shards,
)
from polyad.data.images.sources.found import Found, files_by_split
from polyad.data.json_reader import read_json
from polyad.data.left_out import LeftOut

ROWS = 64
"""Rows that become Python's objects at one time: a row group may be as large as its file."""


def open_arrow(files: list[Path], root: Path, output: Path, left_out: LeftOut) -> Found:
    """Opens files of `save_to_disk`, or of the cache of `datasets`.

    Args:
        files: One at least.
        root: The folder around them.
        output: The prepared folder, for images that are compressed in their file.
        left_out: Counts rows without an image.

    Raises:
        DataError: They have no images with labels.
    """
    packed = Packed(output)
    by_split = files_by_split(files, root, left_out)

    def entries(numbers: list[int]) -> Iterator[Entry]:
        for number in numbers:
            yield from _arrow_entries(files[number], number, packed, len(files) + number, left_out)

    shards = table_shards(files, packed)
    return Found(
        shards=shards,
        splits={
            split: lambda numbers=numbers: entries(numbers)  # type: ignore[misc]
            for split, numbers in by_split.items()
        },
        class_names=None,
        names_of_shards=[_class_names(file, root) for file in files] * 2,
        left_out=left_out,
        packed=packed,
        total_bytes=sum(shard.size for shard in shards),
    )


def _class_names(file: Path, root: Path) -> list[str] | None:
    """What `dataset_info.json` says, the nearest to a file, else the file itself."""
    schema = schema_of(file)
    present = names_in(schema, file)
    column = next((name for name in LABELS if name in present), None)
    if column is None:
        return None
    for folder in file.parents:
        about = folder / "dataset_info.json"
        if about.is_file():
            tree = read_json(about)
            features = tree.get("features") if isinstance(tree, dict) else None
            known = features if isinstance(features, dict) else {}
            if names := names_of_feature(known.get(column)):
                return names
        if folder == root:
            break
    return named_classes(schema.metadata, column)


def _arrow_entries(
    file: Path, shard: int, packed: Packed, packed_shard: int, left_out: LeftOut
) -> Iterator[Entry]:
    import pyarrow as pa

    row = 0
    try:
        with (
            pa.memory_map(str(file)) as mapped,
            Places(file, shard, packed, packed_shard) as places,
        ):
            whole = mapped.read_buffer()
            for batch in _batches(whole):
                batch.validate(full=True)  # or a forged place would be read outside of the file
                columns = columns_of(batch.schema, file)
                places.begin(_begin(batch.column(columns.image), columns.is_struct, whole))
                for at in range(0, len(batch), ROWS):
                    part = batch.slice(at, ROWS)
                    for entry in entries_of(part, columns, file, row, places, left_out):
                        yield entry._replace(name=Path(entry.name).name or entry.name)
                    row += len(part)
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        said = " ".join(str(error).split())[:120]
        raise DataError(f"{file}: cannot be read as Arrow: {said}") from None


def _batches(whole: Any) -> Iterator[Any]:
    import pyarrow as pa

    try:
        stream = pa.ipc.open_stream(whole)
    except pa.ArrowInvalid:
        opened = pa.ipc.open_file(whole)
        return (opened.get_batch(number) for number in range(opened.num_record_batches))
    return iter(stream)


def _begin(images: Any, is_struct: bool, whole: Any) -> int:
    """About where the images of a batch begin."""
    contents = images.field("bytes") if is_struct else images
    last = contents.buffers()[-1]
    return int(last.address - whole.address) if last is not None else 0


def open_parquet(files: list[Path], root: Path, output: Path, left_out: LeftOut) -> Found:
    """Opens files whose names, or those of their folders, say which split they are of.

    Args:
        files: One at least.
        root: What the user named: a file, or a folder around them.
        output: The prepared folder, for images that are compressed in their file.
        left_out: Counts rows without an image.

    Raises:
        DataError: A file is none, or columns are missing.
    """
    import pyarrow.parquet

    columns: list[Columns] = []
    names: list[list[str] | None] = []
    for file in files:
        try:
            schema = pyarrow.parquet.read_schema(file)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{file}: cannot be read as parquet: {_line(error)}") from None
        columns.append(columns_of(schema, file))
        label = columns[-1].label
        names.append(named_classes(schema.metadata, label) if label else None)
    for file, each in zip(files, columns, strict=True):
        if each.attributes != columns[0].attributes:
            raise DataError(
                f"{file}: has the attributes {', '.join(each.attributes) or 'none'}, and "
                f"{files[0]} has {', '.join(columns[0].attributes) or 'none'}"
            )
    packed = Packed(output)
    by_split = files_by_split(files, root, left_out)

    def entries(numbers: list[int]) -> Iterator[Entry]:
        for number in numbers:
            with Places(files[number], number, packed, len(files) + number) as places:
                yield from _parquet_entries(files[number], columns[number], places, left_out)

    shards = table_shards(files, packed)
    return Found(
        shards=shards,
        splits={
            split: lambda numbers=numbers: entries(numbers)  # type: ignore[misc]
            for split, numbers in by_split.items()
        },
        class_names=list(columns[0].attributes) or None,
        names_of_shards=[] if columns[0].attributes else names * 2,
        has_attributes=columns[0].label is None,
        left_out=left_out,
        packed=packed,
        total_bytes=sum(shard.size for shard in shards),
    )


def _parquet_entries(
    file: Path, columns: Columns, places: Places, left_out: LeftOut
) -> Iterator[Entry]:
    import pyarrow.parquet

    row = 0
    try:
        # Without these two, pyarrow holds all compressed bytes of a row group at a time.
        with pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as opened:
            for group in range(opened.num_row_groups):
                places.begin()
                for batch in opened.iter_batches(
                    ROWS, row_groups=[group], columns=columns.wanted, use_threads=False
                ):
                    yield from entries_of(batch, columns, file, row, places, left_out)
                    row += len(batch)
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{file}: cannot be read as parquet: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
