"""Tables of samples, which `datasets` reads: files, folders of them, saved data sets, the hub."""

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError, listed, one_line, user_path
from polyad.data.names import SPLIT_NAMES, named_classes, schema_of
from polyad.data.prepared import SPLITS

HUB = "hub:"
SAVED = ("dataset_dict.json", "state.json")
"""Files of a folder that `save_to_disk` wrote: of several splits, or of one."""
BUILDERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "webdataset",
}
"""What `datasets` calls the reader of a file, by the ending."""


def split_of(file: Path, root: Path) -> str:
    """Returns the split named by a file or its folders, the nearest first; train if none is.

    Names are words, as in val2017, training_set or test-00000-of-00001.parquet.
    """
    for name in reversed(file.relative_to(root).parts):
        for word in re.split(r"[\W\d_]+", name.lower()):
            if word in SPLIT_NAMES:
                return SPLIT_NAMES[word]
    return "train"


def open_tables(path: str) -> dict[str, Any] | None:
    """Opens the splits of a data set.

    Args:
        path: A file or folder of Parquet files or of tar files in WebDataset's form, a folder
            written by `save_to_disk`, or `hub:OWNER/NAME[:CONFIG]`.

    Returns:
        `datasets.Dataset` by split, of those of train, validation and test that there are; None if
        the path is a folder without such files.

    Raises:
        DataError: There is no such data set, it cannot be read, or it has none of these splits.
    """
    place = user_path(path.removeprefix(HUB))
    try:
        if not place.exists():
            splits = _of_hub(path)
        elif any((place / name).is_file() for name in SAVED):
            splits = _saved(place)
        else:
            files = table_files(place)
            if not files:
                return None
            splits = {split: load_files(each) for split, each in files.items()}
    except DataError:
        raise
    except Exception as error:  # of several libraries: pyarrow, the network
        raise DataError(f"data.path: {path}: {one_line(error, 200)}") from None
    named = {SPLIT_NAMES.get(name, name): rows for name, rows in splits.items()}
    found: dict[str, Any] = {split: named[split] for split in SPLITS if split in named}
    if not found:
        raise DataError(f"data.path: {path}: has no train split; it has {listed(splits)}")
    return found


def _of_hub(path: str) -> Mapping[str, Any]:
    import datasets

    if not path.startswith(HUB):
        raise DataError(f"data.path: {path}: there is no such file or folder")
    name, _, config = path.removeprefix(HUB).partition(":")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    loaded: Mapping[str, Any] = datasets.load_dataset(name, config or None)
    return loaded


def _saved(folder: Path) -> Mapping[str, Any]:
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    # A split that was saved alone is the train split, whatever its name.
    return loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


def table_files(place: Path) -> dict[str, list[Path]]:
    """Lists the files of tables by split, in a folder or in folders of it; empty if there are none.

    Raises:
        DataError: There are files of several kinds.
    """
    if place.is_file():
        files, root = [place], place.parent
    else:
        root = place
        inside = (each for each in sorted(place.iterdir()) if each.is_dir())
        files = _tables_in(place) or [file for each in inside for file in _tables_in(each)]
    files = [file for file in files if file.suffix.lower() in BUILDERS]
    kinds = {file.suffix.lower() for file in files}
    if len(kinds) > 1:
        raise DataError(f"data.path: {place}: has files of several kinds: {listed(sorted(kinds))}")
    found: dict[str, list[Path]] = {}
    for file in files:
        found.setdefault(split_of(file, root), []).append(file)
    return found


def _tables_in(folder: Path) -> list[Path]:
    """Lists the tables in a folder whose first entries include one: a folder of a million images is
    not read through."""
    first = itertools.islice(folder.iterdir(), 8)
    if not any(file.suffix.lower() in BUILDERS for file in first):
        return []
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in BUILDERS)


def load_files(files: Sequence[Path]) -> Any:
    """Reads files of one kind as one `datasets.Dataset`.

    Raises:
        DataError: They name the same number of a class differently: `datasets` would give all of
            them the names of the first.
    """
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    builder = BUILDERS[files[0].suffix.lower()]
    paths = [str(file.resolve()) for file in files]
    rows = datasets.load_dataset(builder, data_files=paths, split="train")
    for column, feature in rows.features.items():
        if isinstance(feature, datasets.ClassLabel):
            _check_names(files, column)
    return rows


def _check_names(files: Sequence[Path], column: str) -> None:
    first = named_classes(schema_of(files[0]), column)
    for file in files[1:]:
        names = named_classes(schema_of(file), column)
        if names != first:
            raise DataError(
                f"{file}: names the numbers in {column!r} {listed(names or (), 5)}, and "
                f"{files[0]} {listed(first or (), 5)}: the files of one split need the same names"
            )
