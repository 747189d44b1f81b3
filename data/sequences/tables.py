"""Tables of labelled rows by split, as `datasets` holds them: columns, labels and domains.

A label is a class, a value, or the index of the right choice; another column holds the domain.

Shapes: N rows.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, listed, nearest
from polyad.data.sequences.config import BENCHMARKS, HIDDEN_LABEL, Schema
from polyad.data.tables import each_once, library_errors, open_tables

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet", ".arrow")
"""The endings of files that are tables of rows."""

Labels = npt.NDArray[np.generic]
"""Labels: [N] int64 for classes and choices, float64 for values."""
_HIDDEN = (f"{HIDDEN_LABEL}", f"{float(HIDDEN_LABEL)}")
"""How different kinds of files write a hidden label."""


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

    def fault(self, row: int, fault: str) -> DataError:
        """Returns the error for a row, from 0."""
        return DataError(f"{self.place}, row {row + 1}: {fault}")

    def labels_are_hidden(self, column: str) -> bool:
        """Returns whether all labels of a column are hidden, as in GLUE's test splits."""
        if column not in self.rows.column_names:
            return True
        return all(str(value) in _HIDDEN for value in self.column(column))

    def classes(self, column: str) -> list[str]:
        """Returns the classes of training rows: those named by the data set, or all in its rows.

        Args:
            column: The column of the labels.

        Returns:
            Class names, sorted by number if all are whole numbers, else alphabetically.

        Raises:
            DataError: There are no labels, or only one class.
        """
        words = set(self.labels_in_words(column))
        if len(words) < 2:
            raise DataError(
                f"{self.place}: all {len(self):,} rows have the label {next(iter(words))!r}: with "
                f"one class there is nothing to learn"
            )
        if names := self.class_names(column):
            return names
        numbers = all(re.fullmatch(r"-?\d{1,18}", name) for name in words)
        # Sorted twice, for names such as 1 and 01.
        return sorted(sorted(words), key=int) if numbers else sorted(words)

    def labels_in_words(self, column: str) -> list[str]:
        """Returns the name of each row's class.

        Raises:
            DataError: A label is missing or hidden, or is neither text nor a number of a class.
        """
        names = self.class_names(column)
        words = []
        for row, value in enumerate(self._labels(column)):
            if names is not None and not 0 <= value < len(names):
                raise self.fault(
                    row, f"the label {value!r} is not the number of one of the {len(names)} classes"
                )
            if not isinstance(value, str | int | float) or value != value:
                raise self.fault(row, f"the label {value!r:.60} is not a class: text or a number")
            words.append(_word(value) if names is None else names[int(value)])
        return words

    def class_labels(self, column: str, names: Sequence[str]) -> Labels:
        """Returns the class of each row, matched by name: splits may number classes differently.

        Raises:
            DataError: A label is missing, or is not among the classes.
        """
        number_of = {name: number for number, name in enumerate(names)}
        words = self.labels_in_words(column)
        for row, name in enumerate(words):
            if name not in number_of:
                raise self.fault(
                    row,
                    f"the label {name!r} is not among the {len(names)} of the training rows: "
                    f"{listed(names, 5)}{nearest(name, names)}",
                )
        return np.array([number_of[name] for name in words], dtype=np.int64)

    def numeric_labels(self, column: str, choices: int | None = None) -> Labels:
        """Returns the value of each row, or the index of its right choice.

        Args:
            column: The column of the labels.
            choices: How many choices a row has; None: labels are values.

        Raises:
            DataError: A label is not a finite number, or not the index of a choice.
        """
        wanted = "a finite number" if choices is None else f"a choice from 0 to {choices - 1}"
        numbers = []
        for row, value in enumerate(self._labels(column)):
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = math.nan
            right = math.isfinite(number) if choices is None else number in range(choices)
            if not right:
                raise self.fault(row, f"the label {value!r:.60} is not {wanted}")
            numbers.append(number)
        return np.array(numbers, dtype=np.float64 if choices is None else np.int64)

    def _labels(self, column: str) -> Sequence[Any]:
        """Returns the labels, after checking that none is missing or hidden."""
        labels = self.column(column)
        # Without class names, -1 is an ordinary value.
        unknown = (None, "") if self.class_names(column) is None else (None, "", HIDDEN_LABEL)
        for row, value in enumerate(labels):
            if value in unknown:
                raise self.fault(
                    row,
                    f"has no label, or a hidden one ({value!r}): {column!r} has to be known in "
                    "every row that is trained on or scored",
                )
        return labels

    def domains(self, column: str) -> list[str]:
        """Returns the domain of each row.

        Raises:
            DataError: The column does not exist, or a cell is empty.
        """
        words = []
        for row, value in enumerate(self.column(column)):
            word = "" if value is None else _word(value).strip()
            if not word or value != value:  # NaN marks an empty cell of numbers
                raise self.fault(row, f"has no domain: {column!r} (data.columns.domain)")
            words.append(word)
        return words

    def held_out(self, share: float) -> "tuple[Table, Table]":
        """Holds rows out, evenly; the choice is deterministic.

        Args:
            share: The fraction of rows to hold out.

        Returns:
            The remaining rows and the held-out rows, each in their order.
        """
        out = list[int]()
        for row in range(1, len(self)):
            if len(out) < share * (row + 1):
                out.append(row)
        stay = np.setdiff1d(np.arange(len(self)), out)
        held_out = Table(f"{self.place} (held out)", self.rows.select(out))
        return Table(self.place, self.rows.select(stay)), held_out


def _word(value: Any) -> str:
    """Returns a cell as text: a whole number has no fraction."""
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)


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
    benchmark = BENCHMARKS.get(path, Schema(source=path))
    renamed = {name: split for split, name in schema.splits.items()}
    tables = open_tables(benchmark.source or path, ENDINGS, renamed)
    if tables is None:
        raise DataError(f"{path}: holds no table; a table is {', '.join(ENDINGS)}")
    for split, rows in tables.splits.items():
        if not len(rows):
            raise DataError(f"{path} ({split}): has no rows")
    by_split = {split: Table(f"{path} ({split})", rows) for split, rows in tables.splits.items()}
    return by_split, tables.notes
