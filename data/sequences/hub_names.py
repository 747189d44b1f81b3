"""Names of classes in a local copy of a data set of the hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyad.data.class_names import each_once, named_classes, schema_of
from polyad.data.errors import DataError, listed
from polyad.data.text.hub import HUB, HubDataset, data_files


def check_names(dataset: HubDataset, splits: Mapping[str, Any]) -> None:
    """Checks that all files name the numbers of classes as `datasets` does, which reads one file.

    Args:
        dataset: A local copy.
        splits: As `datasets` opens them.

    Raises:
        DataError: A file gives the same numbers other names.
    """
    files = data_files(dataset)
    for split, rows in splits.items():
        features = (rows.features or {}).items()
        named = {column: each.names for column, each in features if hasattr(each, "names")}
        for file in map(Path, files.get(split, ())):
            if file.suffix not in (".parquet", ".arrow"):
                continue
            metadata = schema_of(file).metadata
            for column, names in named.items():
                theirs = named_classes(metadata, column)
                if theirs is not None and theirs != each_once(names):
                    raise DataError(
                        f"{dataset.spec}: {file} names the numbers in {column!r} "
                        f"{listed(theirs, 5)}, another file {listed(names, 5)}: `datasets` would "
                        f"read both alike; without {HUB} the folder is read by names"
                    )
