"""Names of classes, as files of `datasets` have them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError
from polyad.data.json_reader import parse_json


def named_classes(metadata: Mapping[bytes, bytes] | None, column: str) -> list[str] | None:
    """The names of the numbers in a column, which `datasets` writes beside a schema.

    Args:
        metadata: Of the schema of a Parquet or Arrow file.
        column: Of the labels.

    Returns:
        A name for each number from 0; None: the file names none.
    """
    try:
        about = parse_json((metadata or {}).get(b"huggingface", b"{}"), "huggingface")
        return names_of_feature(about["info"]["features"][column])
    except (ValueError, KeyError, TypeError):
        return None


def names_of_feature(feature: Any) -> list[str] | None:
    """The names in the description of a column, as `dataset_info.json` has it."""
    names = feature.get("names") if isinstance(feature, dict) else None
    return each_once(list(map(str, names))) if isinstance(names, list) and names else None


def schema_of(file: Path) -> Any:
    """The schema of a Parquet or Arrow file.

    Raises:
        DataError: It cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    kind = "Parquet" if file.suffix.lower() == ".parquet" else "Arrow"
    try:
        if kind == "Parquet":
            return pyarrow.parquet.read_schema(file)
        with pyarrow.memory_map(str(file)) as mapped:
            try:
                return pyarrow.ipc.open_stream(mapped).schema
            except pyarrow.ArrowInvalid:
                return pyarrow.ipc.open_file(mapped).schema
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as {kind}: {str(error)[:120]}") from None


def each_once(names: Sequence[str]) -> list[str]:
    """Names of which none stands twice: of ImageNet's two cranes the number tells them apart."""
    count = Counter(names)
    return [f"{name} ({number})" if count[name] > 1 else name for number, name in enumerate(names)]
