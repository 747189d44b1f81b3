"""A folder of Arrow files as `datasets` keeps and saves them: images are read inside of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyad.data.class_names import named_classes, names_of_feature, schema_of
from polyad.data.errors import DataError
from polyad.data.images.packed import Packed
from polyad.data.images.shards import Entry
from polyad.data.images.sources.columns import (
    LABELS,
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
"""Rows that become Python's objects at one time."""


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
            yield from _entries(files[number], number, packed, len(files) + number, left_out)

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


def _entries(
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
