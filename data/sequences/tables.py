"""Tables of labelled rows by split, as `datasets` holds them, and what their columns are called."""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from polyad.data.errors import DataError, listed, nearest
from polyad.data.names import each_once
from polyad.data.sequences.config import BENCHMARKS, Schema
from polyad.data.tables import library_errors, open_tables

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet", ".arrow")
"""The endings of files that are tables of rows."""


@dataclass(frozen=True)
class Table:
    """The rows of a split."""

    place: str
    """The file or data set with the split, for errors."""
    rows: Any
    """`datasets.Dataset`."""

    def __len__(self) -> int:
        """Counts the rows."""
        return len(self.rows)

    def column(self, name: str) -> list[Any]:
        """Returns a column by its name.

        Raises:
            DataError: The column does not exist.
        """
        present = self.rows.column_names
        if name not in present:
            raise DataError(
                f"{self.place}: no column {name!r}; columns present: {listed(present)}"
                f"{nearest(name, present)}; data.columns names them"
            )
        with library_errors(self.place):
            values: list[Any] = self.rows.select_columns([name])[:][name]
        return values

    def class_names(self, column: str) -> list[str] | None:
        """Returns the names of classes by number, if the data set has them."""
        names = getattr(self.rows.features.get(column), "names", None)
        return each_once(names) if names else None

    def select(self, numbers: npt.ArrayLike, place: str | None = None) -> "Table":
        """Returns some of the rows, and names them."""
        return Table(place or self.place, self.rows.select(numbers))

    def fault(self, row: int, fault: str) -> DataError:
        """Returns the error for a row, from 0."""
        return DataError(f"{self.place}, row {row + 1}: {fault}")


def read_tables(path: str, schema: Schema) -> tuple[dict[str, Table], list[str]]:
    """Reads the splits of a source.

    Args:
        path: As `data.path`.
        schema: The schema of the columns.

    Returns:
        The tables by split, and notes for the user on what was not read.

    Raises:
        DataError: The source does not exist, cannot be read, or has no rows.
    """
    source = path
    if path in BENCHMARKS:
        source = BENCHMARKS[path].source or path
    renamed = {name: split for split, name in schema.splits.items()}
    tables = open_tables(source, ENDINGS, renamed)
    if tables is None:
        raise DataError(f"{path}: holds no table; a table is {', '.join(ENDINGS)}")
    for split, rows in tables.splits.items():
        if not len(rows):
            raise DataError(f"{path} ({split}): has no rows")
    by_split = {split: Table(f"{path} ({split})", rows) for split, rows in tables.splits.items()}
    return by_split, tables.notes
