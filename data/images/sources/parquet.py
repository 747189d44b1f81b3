"""Parquet files of Hugging Face's: a column of images, and one of labels, or columns of true and
false, which are attributes (as of flwrlabs/celeba).
"""

from collections.abc import Iterator
from pathlib import Path

from polyad.data.class_names import named_classes
from polyad.data.errors import DataError
from polyad.data.images.packed import Packed
from polyad.data.images.shards import Entry
from polyad.data.images.sources.columns import Columns, Places, columns_of, entries_of, table_shards
from polyad.data.images.sources.found import Found, files_by_split
from polyad.data.left_out import LeftOut

ROWS = 64
"""Rows that are decoded at one time: a row group may be as large as its file."""


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
                yield from _entries(files[number], columns[number], places, left_out)

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


def _entries(file: Path, columns: Columns, places: Places, left_out: LeftOut) -> Iterator[Entry]:
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
