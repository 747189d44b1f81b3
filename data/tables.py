"""Tables of samples, which `datasets` reads: files, folders of them, saved data sets, the hub."""

import contextlib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from polyad.data.errors import DataError, listed, one_line, user_path

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    "test": "test",
}
"""Names of folders and files that hold a split, and the split that they mean."""
HUB = "hub:"
SAVED = ("dataset_dict.json", "state.json")
"""Files of a folder that `save_to_disk` wrote: of several splits, or of one."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
BUILDERS = {
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "webdataset",
}
"""What `datasets` calls the reader of a file, by the ending."""


def each_once(names: Sequence[str]) -> list[str]:
    """Makes names unique by adding numbers: ImageNet has two classes named crane."""
    count = Counter(names)
    return [f"{name} ({number})" if count[name] > 1 else name for number, name in enumerate(names)]


class Tables(NamedTuple):
    """An opened data set.

    Attributes:
        splits: `datasets.Dataset` by split, of those of train, validation and test that there are,
            or `datasets.IterableDataset`.
        unread: Names of files and splits that are not read.
        notes: What was not read; a line each.
    """

    splits: dict[str, Any]
    unread: list[str]
    notes: list[str]


def open_tables(
    path: str,
    endings: Collection[str],
    renamed: Mapping[str, str] | None = None,
    *,
    streaming: bool = False,
) -> Tables | None:
    """Opens the splits of a data set.

    Args:
        path: A file or folder of tables, a folder written by `save_to_disk`, or
            `hub:OWNER/NAME[:CONFIG]`, where OWNER/NAME may be a folder with the files of one.
        endings: The endings of files that are read, of `SEPARATORS` and `BUILDERS`.
        renamed: Splits that a data set calls otherwise, by its names.
        streaming: Whether to read a data set of the hub without a copy on the disk.

    Returns:
        The tables; None if the path is a file or folder without any.

    Raises:
        DataError: There is no such data set, it cannot be read, or it has none of these splits.
    """
    renamed = renamed or {}
    place = user_path(path.removeprefix(HUB))
    with library_errors(path):
        if is_saved(place) or path.startswith(HUB):
            opened = _saved(place) if is_saved(place) else _of_hub(path, endings, streaming)
            splits = {split_named(name, renamed) or name: rows for name, rows in opened.items()}
            unread = [name for name in splits if name not in SPLITS]
        elif not place.exists():
            raise DataError(f"{path}: there is no such file or folder")
        else:
            files, unread = table_files(place, endings, renamed)
            if not files:
                return None
            splits = {name: load_files(each) for name, each in files.items()}
    ours: dict[str, Any] = {split: splits[split] for split in SPLITS if split in splits}
    if not ours:
        raise DataError(f"{path}: has no train split; it has {listed(splits)}")
    notes = [f"{path}: not read: {listed(unread, 5)}"] if unread else []
    return Tables(ours, unread, notes)


def is_saved(place: Path) -> bool:
    """Returns whether a folder was written by `save_to_disk`."""
    return any((place / name).is_file() for name in SAVED)


@contextlib.contextmanager
def library_errors(place: str | Path) -> Iterator[None]:
    """Turns any exception of `datasets`, and of what it uses, into one line that names a place."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of several libraries: pyarrow, pandas, the network
        raise DataError(f"{place}: {one_line(error.__cause__ or error, 300)}") from None


def _of_hub(path: str, endings: Collection[str], streaming: bool) -> Mapping[str, Any]:
    import datasets

    name, _, config = path.removeprefix(HUB).partition(":")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    folder = user_path(name)
    builder = datasets.load_dataset_builder(
        str(folder) if folder.is_dir() else name, config or None
    )
    files = {
        str(split): [Path(file) for file in each]
        for split, each in (builder.config.data_files or {}).items()
    }
    copies = [file for each in files.values() for file in each]
    if copies and all(file.exists() and _ending(file, endings) for file in copies):
        # One by one, since splits of a copy may name the same classes differently.
        return {split: load_files(each) for split, each in files.items()}
    if not streaming:
        builder.download_and_prepare()
    opened: Mapping[str, Any] = (
        builder.as_streaming_dataset() if streaming else builder.as_dataset()
    )
    return opened


def _saved(folder: Path) -> Mapping[str, Any]:
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    # A split that was saved alone is the train split, whatever its name.
    return loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


def split_named(name: str, renamed: Mapping[str, str]) -> str | None:
    """Returns the split that a name means."""
    if name in renamed:
        return renamed[name]
    split = SPLIT_NAMES.get(name)
    return None if split in renamed.values() else split


def split_of(file: Path, root: Path, renamed: Mapping[str, str]) -> str | None:
    """Returns the split named by a file or its folders, the nearest first; None if none is.

    Names are words, as in val2017, training_set or test-00000-of-00001.parquet; those of `renamed`
    are all that precedes a dot or a hyphen.
    """
    for name in reversed(file.relative_to(root).parts):
        whole = re.split(r"[.-]", name.lower())[0]
        for word in (whole, *re.split(r"[\W\d_]+", name.lower())):
            if split := split_named(word, renamed):
                return split
    return None


def table_files(
    place: Path, endings: Collection[str], renamed: Mapping[str, str]
) -> tuple[dict[str, list[Path]], list[str]]:
    """Lists the files of tables by split, in a folder or in folders of it; empty if there are none.

    A file whose name has no split is of train, if no other is.

    Returns:
        The files, and the names of those that are not read: tables without a split beside the
        files of train.
    """
    by_split: dict[str | None, list[Path]] = {}
    root = place.parent if place.is_file() else place
    files = [place]
    if place.is_dir():
        inside = (each for each in sorted(place.iterdir()) if each.is_dir())
        files = sorted(file for file in place.iterdir() if file.is_file())
        if not any(_ending(file, endings) for file in files):
            files = [file for each in inside for file in _tables_in(each, endings)]
    for file in files:
        if _ending(file, endings) and not file.name.startswith("."):
            by_split.setdefault(split_of(file, root, renamed), []).append(file)
    unnamed = by_split.pop(None, [])
    if unnamed and "train" not in by_split:
        by_split["train"], unnamed = unnamed, []
    unread = [file.name for file in unnamed]
    return {str(split): each for split, each in by_split.items()}, unread


def _tables_in(folder: Path, endings: Collection[str]) -> list[Path]:
    """Lists the tables in a folder whose first entries include one: a folder of a million images is
    not read through."""
    first = itertools.islice(folder.iterdir(), 8)
    if not any(_ending(file, endings) for file in first):
        return []
    return sorted(file for file in folder.iterdir() if _ending(file, endings))


def _ending(file: Path, endings: Collection[str]) -> str:
    """Returns which of some endings a file has; empty: none."""
    return next((ending for ending in endings if file.name.lower().endswith(ending)), "")


def load_files(files: Sequence[Path]) -> Any:
    """Reads files as one `datasets.Dataset`.

    Args:
        files: The files.

    Raises:
        DataError: One cannot be read, or they name the same number of a class differently.
    """
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    # One by one: read together, all would get the names of classes of the first.
    tables = [_table(file) for file in files]
    with library_errors(files[0].parent):
        return datasets.concatenate_datasets(tables)


def _table(file: Path) -> Any:
    import datasets

    ending = file.suffix.lower()
    with library_errors(file):
        if ending in SEPARATORS:
            return _separated(file, SEPARATORS[ending])
        if not file.stat().st_size:
            raise DataError(f"{file}: has no rows")
        path = str(file.resolve())
        return datasets.load_dataset(BUILDERS[ending], data_files=path, split="train")


def _separated(file: Path, separator: str) -> Any:
    """Reads a table whose values are all text. `datasets` itself would take a line of too many
    values for another, and complete one of too few. Values between tabs are as they are, as in
    GLUE; between commas they may be quoted."""
    import datasets
    import pyarrow
    import pyarrow.csv

    read = pyarrow.csv.ReadOptions(block_size=file.stat().st_size + 1)
    parse = pyarrow.csv.ParseOptions(
        delimiter=separator, quote_char='"' if separator == "," else False, newlines_in_values=True
    )
    names = pyarrow.csv.open_csv(file, read, parse).schema.names
    words = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
    )
    return datasets.Dataset(pyarrow.csv.read_csv(file, read, parse, words))
