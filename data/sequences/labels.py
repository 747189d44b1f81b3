"""Labels of a table as numbers, and domains of its rows.

A label is a class, a value, or the index of the right choice; another column holds the domain.

Shapes: N rows.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, listed, nearest
from polyad.data.sequences.config import HIDDEN_LABEL
from polyad.data.sequences.tables import Table

Labels = npt.NDArray[np.generic]
"""Labels: [N] int64 for classes and choices, float64 for values."""
_HIDDEN = (f"{HIDDEN_LABEL}", f"{float(HIDDEN_LABEL)}")
"""How different kinds of files write a hidden label."""


def labels_are_hidden(table: Table, column: str) -> bool:
    """Returns whether all labels of a table are hidden, as in GLUE's test splits.

    Args:
        table: Any table.
        column: The column of its labels.
    """
    if column not in table.rows.column_names:
        return True
    return all(str(value) in _HIDDEN for value in table.column(column))


def class_names(table: Table, column: str) -> list[str]:
    """Returns the classes of a training split: those named by the data set, or all in its rows.

    Args:
        table: The table of the training rows.
        column: The column of the labels.

    Returns:
        Class names, sorted by number if all are whole numbers, else alphabetically.

    Raises:
        DataError: There are no labels, or only one class.
    """
    words = set(labels_in_words(table, column))
    if len(words) < 2:
        raise DataError(
            f"{table.place}: all {len(table):,} rows have the label {next(iter(words))!r}: with "
            f"one class there is nothing to learn"
        )
    if names := table.class_names(column):
        return names
    numbers = all(re.fullmatch(r"-?\d{1,18}", name) for name in words)
    # Sorted twice, for names such as 1 and 01.
    return sorted(sorted(words), key=int) if numbers else sorted(words)


def labels_in_words(table: Table, column: str) -> list[str]:
    """Returns the name of each row's class.

    Args:
        table: The table of any split.
        column: The column of the labels.

    Raises:
        DataError: A label is missing or hidden, or is neither text nor a number of a class.
    """
    names = table.class_names(column)
    words = []
    for row, value in enumerate(_labels(table, column)):
        if names is not None and not 0 <= value < len(names):
            raise table.fault(
                row, f"the label {value!r} is not the number of one of the {len(names)} classes"
            )
        if not isinstance(value, str | int | float) or value != value:
            raise table.fault(row, f"the label {value!r:.60} is not a class: text or a number")
        words.append(_word(value) if names is None else names[int(value)])
    return words


def _word(value: Any) -> str:
    """Returns a cell as text: a whole number has no fraction."""
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)


def class_labels(table: Table, column: str, names: Sequence[str]) -> Labels:
    """Returns the class of each row, matched by name: splits may number classes differently.

    Raises:
        DataError: A label is missing, or is not among the classes.
    """
    number_of = {name: number for number, name in enumerate(names)}
    words = labels_in_words(table, column)
    for row, name in enumerate(words):
        if name not in number_of:
            raise table.fault(
                row,
                f"the label {name!r} is not among the {len(names)} of the training rows: "
                f"{listed(names, 5)}{nearest(name, names)}",
            )
    return np.array([number_of[name] for name in words], dtype=np.int64)


def numeric_labels(table: Table, column: str, choices: int | None = None) -> Labels:
    """Returns the value of each row, or the index of its right choice.

    Args:
        table: The table of any split.
        column: The column of the labels.
        choices: How many choices a row has; None: labels are values.

    Raises:
        DataError: A label is not a finite number, or not the index of a choice.
    """
    wanted = "a finite number" if choices is None else f"a choice from 0 to {choices - 1}"
    numbers = []
    for row, value in enumerate(_labels(table, column)):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        right = math.isfinite(number) if choices is None else number in range(choices)
        if not right:
            raise table.fault(row, f"the label {value!r:.60} is not {wanted}")
        numbers.append(number)
    return np.array(numbers, dtype=np.float64 if choices is None else np.int64)


def _labels(table: Table, column: str) -> Sequence[Any]:
    """Returns the labels, after checking that none is missing or hidden."""
    labels = table.column(column)
    # Without class names, -1 is an ordinary value.
    unknown = (None, "") if table.class_names(column) is None else (None, "", HIDDEN_LABEL)
    for row, value in enumerate(labels):
        if value in unknown:
            raise table.fault(
                row,
                f"has no label, or a hidden one ({value!r}): {column!r} has to be known in every "
                "row that is trained on or scored",
            )
    return labels


def domains_of(table: Table, column: str) -> list[str]:
    """Returns the domain of each row.

    Args:
        table: The table of any split.
        column: The column of the domains.

    Raises:
        DataError: The column does not exist, or a cell is empty.
    """
    words = []
    for row, value in enumerate(table.column(column)):
        word = "" if value is None else _word(value).strip()
        if not word or value != value:  # NaN marks an empty cell of numbers
            raise table.fault(row, f"has no domain: {column!r} (data.columns.domain)")
        words.append(word)
    return words


def held_out(table: Table, share: float) -> tuple[Table, Table]:
    """Holds rows out, evenly; the choice is deterministic.

    Args:
        table: The table of all rows.
        share: The fraction of rows to hold out.

    Returns:
        The remaining rows and the held-out rows, each in their order.
    """
    out = list[int]()
    for row in range(1, len(table)):
        if len(out) < share * (row + 1):
            out.append(row)
    stay = np.setdiff1d(np.arange(len(table)), out)
    return table.select(stay), table.select(out, f"{table.place} (held out)")
