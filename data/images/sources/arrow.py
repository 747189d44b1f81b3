"""A folder of Arrow files as `datasets` keeps and saves them: images are read inside of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.class_names import named_classes, names_of_feature
from data.errors import DataError
from data.images.shards import Entry, Shard
from data.images.sources.found import Found, split_of
from data.images.sources.parquet import IMAGES, LABELS


def open_arrow(root: Path) -> Found:
    """Opens a folder of `save_to_disk`, or of the cache of `datasets`.

    Raises:
        DataError: It has no images with labels.
    """
    # Beside what was saved `datasets` keeps what `map` and the like have made of it.
    files = sorted(file for file in root.rglob("*.arrow") if not file.name.startswith("cache-"))
    shards = [
        Shard(path=str(file.resolve()), kind="range", size=file.stat().st_size) for file in files
    ]
    by_split: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        by_split.setdefault(split_of(file, root), []).append(number)

    def entries(numbers: list[int]) -> Iterator[Entry]:
        for number in numbers:
            yield from _rows(files[number], number)

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


def _class_names(file: Path, root: Path) -> list[str] | None:
    """What `dataset_info.json` says, the nearest to a file, else the file itself."""
    for folder in file.parents:
        about = folder / "dataset_info.json"
        if about.is_file():
            try:
                features = json.loads(about.read_text(encoding="utf-8")).get("features") or {}
            except (ValueError, AttributeError, OSError) as error:
                raise DataError(f"{about}: cannot be read: {str(error)[:120]}") from None
            for label in LABELS:
                if names := names_of_feature(features.get(label)):
                    return names
        if folder == root:
            break
    schema = _schema(file)
    label = next((name for name in LABELS if name in schema.names), None)
    return named_classes(schema.metadata, label) if label else None


def _schema(file: Path) -> Any:
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as mapped:
            try:
                return pa.ipc.open_stream(mapped).schema
            except pa.ArrowInvalid:
                return pa.ipc.open_file(mapped).schema
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as Arrow: {str(error)[:120]}") from None


def _rows(file: Path, shard: int) -> Iterator[Entry]:
    import pyarrow as pa

    try:
        yield from _entries(file, shard)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as Arrow: {str(error)[:120]}") from None


def _entries(file: Path, shard: int) -> Iterator[Entry]:
    import pyarrow as pa

    with pa.memory_map(str(file)) as mapped:
        whole = mapped.read_buffer()
        try:
            batches = iter(pa.ipc.open_stream(whole))
        except pa.ArrowInvalid:
            opened = pa.ipc.open_file(whole)
            batches = (opened.get_batch(n) for n in range(opened.num_record_batches))
        row = 0
        for batch in batches:
            names = batch.schema.names
            image = next((name for name in IMAGES if name in names), None)
            label = next((name for name in LABELS if name in names), None)
            if image is None or label is None:
                raise DataError(f"{file}: has no columns of images and labels; it has {names}")
            if not pa.types.is_struct(batch[image].type):
                raise DataError(f"{file}: the column {image} holds no images of `datasets`")
            if not pa.types.is_integer(batch[label].type):
                raise DataError(
                    f"{file}: the column {label} holds {batch[label].type}, and no numbers of "
                    f"classes"
                )
            content = batch[image].field("bytes")
            if content.null_count:
                raise DataError(
                    f"{file}: {content.null_count:,} images are paths to other files, without "
                    f"bytes; name the folder of those files"
                )
            paths = batch[image].field("path").to_pylist()
            labels = batch[label].to_pylist()
            ends = content.buffers()[1]
            wide = pa.types.is_large_binary(content.type)
            offsets = memoryview(ends).cast("q" if wide else "i")
            base = content.buffers()[2].address - whole.address
            for place, (number, path) in enumerate(zip(labels, paths, strict=True)):
                begin = offsets[content.offset + place]
                size = offsets[content.offset + place + 1] - begin
                known = -1 if number is None else int(number)
                name = Path(path).name if path else f"row {row}"
                yield Entry(shard, base + begin, size, known, name)
                row += 1
