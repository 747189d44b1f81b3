"""Tables of rows by split: .csv, .tsv, .jsonl and .parquet files, and Hugging Face data sets.

A table is held in memory, by column: fine-tuning data is small compared with training data.
"""

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError, listed, nearest, user_path
from polyad.data.json_reader import parse_json
from polyad.data.names import SPLIT_NAMES, each_once, named_classes, schema_of
from polyad.data.prepared import SPLITS
from polyad.data.sequences.config import BENCHMARKS, Schema
from polyad.data.text.hub import HUB, HubDataset, data_files

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Table:
    """The rows of a split."""

    place: str
    """The file or data set with the split, for errors."""
    columns: Mapping[str, Sequence[Any]]
    """The requested columns that exist, all of the same length."""
    present: Sequence[str]
    """Names of all columns."""
    class_names: Sequence[str] | None = None
    """Names of the classes by number, if the data set has them."""
    note: str | None = None
    """A note for the user on how it was read."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def column(self, name: str) -> Sequence[Any]:
        """Returns a column by its name.

        Raises:
            DataError: The column does not exist.
        """
        if name not in self.columns:
            raise DataError(
                f"{self.place}: no column {name!r}; columns present: {listed(self.present)}"
                f"{nearest(name, self.present)}; data.columns names them"
            )
        return self.columns[name]

    def rows(self, numbers: Sequence[int]) -> "Table":
        """Returns some of the rows."""
        picked = {key: [values[n] for n in numbers] for key, values in self.columns.items()}
        return replace(self, columns=picked)


def read_tables(path: str, schema: Schema) -> dict[str, Table]:
    """Reads the splits of a source.

    Raises:
        DataError: The source does not exist or cannot be read.
    """
    wanted = [schema.text, schema.label, *schema.choices]
    wanted += [name for name in (schema.pair, schema.domain) if name]
    folder = user_path(path)
    if folder.is_file():
        return {_split_of(folder, schema) or "train": _read_files([folder], wanted, schema.label)}
    if folder.is_dir() and (tables := _read_folder(folder, schema, wanted)):
        return tables
    return _read_dataset(path, schema, wanted)


def _split_of(file: Path, schema: Schema) -> str | None:
    """Returns the split in a file's name, as in train.csv or validation-00000-of-00001.parquet."""
    name = file.name.split(".")[0].split("-")[0].lower()
    theirs = {other: split for split, other in schema.splits.items()}
    return theirs.get(name) or SPLIT_NAMES.get(name)


def _is_table(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _read_folder(folder: Path, schema: Schema, wanted: Sequence[str]) -> dict[str, Table]:
    """Reads a folder with one or several files per split; empty if it has none."""
    shown = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    files: dict[str, list[Path]] = {}
    for file in shown:
        if split := _split_of(file, schema):
            files.setdefault(split, []).append(file)
    found: dict[str, list[Path]] = {split: files[split] for split in SPLITS if split in files}
    if not any(_is_table(file) for each in found.values() for file in each):
        return {}
    for each in found.values():
        _check_files(each)
    tables = {split: _read_files(each, wanted, schema.label) for split, each in found.items()}
    others = [file.name for file in shown if _is_table(file) and not _split_of(file, schema)]
    if others:
        first = next(iter(tables))
        left = f"{folder}: not read, as their names contain no split: {listed(others, 3)}"
        tables[first] = replace(tables[first], note=_joined_notes([left, tables[first].note]))
    return tables


def _check_files(files: Sequence[Path]) -> None:
    """Checks that all files of a split are tables, and that none is listed twice."""
    by_name: dict[str, Path] = {}
    for file in files:
        if not _is_table(file):
            raise DataError(
                f"{file}: has the name of a split, but is not a table ({', '.join(SUFFIXES)}); "
                "convert it, or move it elsewhere"
            )
        other = by_name.setdefault(file.stem, file)
        if other is not file:
            raise DataError(
                f"{file}: exists besides {other.name}, so both would be read as one split; move "
                "one of them elsewhere"
            )


def _joined_notes(notes: Iterable[str | None]) -> str | None:
    """Joins notes to one line; None if there are none."""
    return "; ".join(note for note in notes if note) or None


def _read_files(files: Sequence[Path], wanted: Sequence[str], label: str) -> Table:
    return joined(
        [
            replace(_READERS[_suffix(file)](file, wanted), class_names=_class_names(file, label))
            for file in files
        ],
        label,
    )


def joined(tables: Sequence[Table], label: str) -> Table:
    """Concatenates tables; classes are matched by name.

    Args:
        tables: At least one.
        label: The column of labels.

    Raises:
        DataError: Their columns differ, or only some of them name their classes.
    """
    first = tables[0]
    for table in tables:
        if table.columns.keys() != first.columns.keys():
            raise DataError(
                f"{table.place}: its columns are {listed(table.present)}, those of {first.place} "
                f"{listed(first.present)}"
            )
    names = list(dict.fromkeys(name for table in tables for name in table.class_names or ()))
    if any(table.class_names != first.class_names for table in tables):
        tables = [_in_words(table, label) for table in tables]
    columns = {name: [v for table in tables for v in table.columns[name]] for name in first.columns}
    note = _joined_notes(table.note for table in tables)
    return replace(first, columns=columns, class_names=names or None, note=note)


def _in_words(table: Table, label: str) -> Table:
    """Replaces the numbers in the column of labels by class names."""
    values, names = table.columns.get(label, ()), table.class_names
    if names is None and not all(isinstance(value, str | None) for value in values):
        raise DataError(
            f"{table.place}: its column {label!r} holds numbers without names, but other files "
            "name theirs, so it is unknown which number is which class; all files need names, or "
            "none"
        )
    words = [names[v] if names and type(v) is int and 0 <= v < len(names) else v for v in values]
    return replace(table, columns={**table.columns, label: words})


def _class_names(file: Path, label: str) -> list[str] | None:
    """Returns the class names in a file's metadata; None if it has none."""
    if file.suffix.lower() != ".parquet":
        return None
    return named_classes(schema_of(file), label)


def _suffix(file: Path) -> str:
    suffix = file.suffix.lower()
    if suffix not in _READERS:
        raise DataError(f"{file}: is not a table; supported: {', '.join(SUFFIXES)}")
    return suffix


def _read_csv(file: Path, wanted: Sequence[str]) -> Table:
    return _read_rows(file, wanted, {"delimiter": ","})


def _read_tsv(file: Path, wanted: Sequence[str]) -> Table:
    """Reads tab-separated values: quoted as in .csv, or unquoted if that fails, as in GLUE."""
    try:
        return _read_rows(file, wanted, {"delimiter": "\t"})
    except DataError as quoted:
        table = _read_rows(file, wanted, {"delimiter": "\t", "quoting": csv.QUOTE_NONE})
        said = str(quoted).removeprefix(f"{file}")
        note = f"{file}: quotation marks are read as part of the values, as they do not match{said}"
        return replace(table, note=note)


def _read_rows(file: Path, wanted: Sequence[str], dialect: dict[str, Any]) -> Table:
    csv.field_size_limit(sys.maxsize)
    line = 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True, **dialect)
            present = list(reader.fieldnames or ())
            _check_header(file, present, wanted, dialect["delimiter"])
            columns: dict[str, list[Any]] = {n: [] for n in dict.fromkeys(wanted) if n in present}
            for row in reader:
                line = reader.line_num
                if None in row or None in row.values():
                    raise DataError(
                        f"{file}, line {line}: does not have as many values as the {len(present)} "
                        "columns of the first line"
                    )
                if dialect["delimiter"] == "\t" and any("\t" in value for value in row.values()):
                    raise DataError(
                        f"{file}, line {line}: a value that begins with a quotation mark holds a "
                        f"tab: several columns may have become one"
                    )
                for name, values in columns.items():
                    values.append(row[name])
    except UnicodeDecodeError:
        raise DataError(f"{file}, line {_undecodable(file)}: is not UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{file}, after line {line}: cannot be read: {error}") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
    return Table(str(file), columns, present)


def _check_header(
    file: Path, present: Sequence[str], wanted: Sequence[str], delimiter: str
) -> None:
    _check_once(f"{file}, line 1", present, wanted)
    other = next((mark for mark in ",;\t|" if mark != delimiter and mark in "".join(present)), None)
    if len(present) == 1 and other is not None:
        raise DataError(
            f"{file}, line 1: {present[0]!r:.80} is one column: values are separated by "
            f"{delimiter!r} in a file of {file.suffix}, and not by {other!r}"
        )


def _check_once(place: str, present: Sequence[str], wanted: Sequence[str]) -> None:
    twice = next((name for name in wanted if list(present).count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"{place}: there are {present.count(twice)} columns named {twice!r}; only one is "
            "allowed"
        )


def _undecodable(file: Path) -> int:
    """Returns the number of the first line that is not UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _read_jsonl(file: Path, wanted: Sequence[str]) -> Table:
    rows: list[dict[str, Any]] = []
    number = 0
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                row = parse_json(line, f"{file}, line {number}", once=True)
                if not isinstance(row, dict):
                    raise DataError(f"{file}, line {number}: is not a JSON object")
                rows.append(row)
    except UnicodeDecodeError:
        raise DataError(f"{file}, line {_undecodable(file)}: is not UTF-8") from None
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file}, line {max(1, number)}: cannot be read: {error}") from None
    present = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in wanted if name in present}
    return Table(str(file), columns, present)


def _read_parquet(file: Path, wanted: Sequence[str]) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        present = pyarrow.parquet.read_schema(file).names
        _check_once(str(file), present, wanted)
        names = [name for name in dict.fromkeys(wanted) if name in present]
        columns = pyarrow.parquet.read_table(file, columns=names).to_pydict()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{file}: cannot be read as Parquet: {reason}") from None
    return Table(str(file), columns, present)


_READERS: dict[str, Callable[[Path, Sequence[str]], Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _read_dataset(path: str, schema: Schema, wanted: Sequence[str]) -> dict[str, Table]:
    from polyad.data.text.hub import find_dataset, open_rows, other_splits, read_columns

    spec = path
    if path in BENCHMARKS:
        spec = BENCHMARKS[path].source or path
    dataset = find_dataset(spec)
    if dataset is None:
        raise DataError(
            f"{path}: no such file or folder with tables of splits ({', '.join(SUFFIXES)}), and "
            f"not a benchmark{nearest(path, BENCHMARKS)}; benchmarks: {', '.join(BENCHMARKS)}; for "
            "a data set on the Hugging Face hub write hub:OWNER/NAME[:CONFIG]"
        )
    splits = open_rows(dataset)
    if dataset.kind == "copy":
        check_names(dataset, splits)
    found: dict[str, Table] = {}
    for split in SPLITS:
        theirs = schema.splits.get(split, split)
        if theirs not in splits:
            continue
        rows = splits[theirs]
        columns = read_columns(dataset, rows, wanted)
        names = getattr((rows.features or {}).get(schema.label), "names", None)
        found[split] = Table(
            place=f"{spec} ({theirs})",
            columns=columns,
            present=list(rows.column_names or columns),
            class_names=each_once(names) if names else None,
        )
    if not found:
        raise DataError(
            f"{spec}: has none of the splits {', '.join(SPLITS)}; {other_splits(dataset, splits)}"
        )
    if "train" not in found and len(splits) > len(found):
        first = next(iter(found))
        left = f"{spec}: no train split; {other_splits(dataset, splits)}"
        found[first] = replace(found[first], note=_joined_notes([left, found[first].note]))
    return found


def held_out(table: Table, share: float) -> tuple[Table, Table]:
    """Holds rows out evenly; the choice is deterministic.

    Args:
        table: The table of all rows.
        share: The fraction of rows to hold out.

    Returns:
        The remaining rows and the held-out rows.
    """
    from polyad.data.text.source import split_of_documents

    splits: Iterator[str] = split_of_documents("train", {"validation": share})
    numbers: dict[str, list[int]] = {"train": [], "validation": []}
    for number in range(len(table)):
        numbers[next(splits)].append(number)
    stay, out = (table.rows(numbers[name]) for name in ("train", "validation"))
    return stay, replace(out, place=f"{table.place} (held out)")


def check_names(dataset: HubDataset, splits: Mapping[str, Any]) -> None:
    """Checks that all files number their classes alike; `datasets` reads the names of one file
    only.

    Raises:
        DataError: A file names a number differently.
    """
    files = data_files(dataset)
    for split, rows in splits.items():
        features = (rows.features or {}).items()
        named = {column: each.names for column, each in features if hasattr(each, "names")}
        for file in map(Path, files.get(split, ())):
            if file.suffix not in (".parquet", ".arrow"):
                continue
            schema = schema_of(file)
            for column, names in named.items():
                theirs = named_classes(schema, column)
                if theirs is not None and theirs != each_once(names):
                    raise DataError(
                        f"{dataset.spec}: {file} names the numbers in {column!r} "
                        f"{listed(theirs, 5)}, another file {listed(names, 5)}: `datasets` would "
                        f"read both alike; without {HUB} the folder is read by names"
                    )
