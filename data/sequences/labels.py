"""Labels of a table as numbers: classes, values, or the numbers of right choices.

Shapes: N rows.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, listed, nearest
from polyad.data.sequences.schemas import HIDDEN
from polyad.data.sequences.tables import Table

Labels = npt.NDArray[np.generic]
"""[N] int64 of classes and choices, or float64 of values."""
_HIDDEN = (f"{HIDDEN}", f"{float(HIDDEN)}")
"""How files of several kinds write a label that is not told."""


def is_hidden(table: Table, column: str) -> bool:
    """Whether no row of a table tells its label, as those of GLUE's test splits.

    Args:
        table: Any.
        column: Of its labels.
    """
    values = table.columns.get(column)
    return values is None or all(str(value) in _HIDDEN for value in values)


def class_names(table: Table, column: str) -> list[str]:
    """The classes of a training split: those that the data set names, or all that rows have.

    Args:
        table: Of the training rows.
        column: Of the labels.

    Returns:
        Names in their order: by number where all are whole numbers, else of the alphabet.

    Raises:
        DataError: There are no labels, or there is one class only.
    """
    found = set(labels_in_words(table, column))
    if table.class_names is not None:
        names = list(table.class_names)
    else:
        numbers = all(re.fullmatch(r"-?\d{1,18}", name) for name in found)
        names = sorted(sorted(found), key=int) if numbers else sorted(found)  # as 1 and 01
    if len(found) < 2:
        raise DataError(
            f"{table.place}: all {len(table):,} rows have the label {next(iter(found))!r}: with "
            f"one class there is nothing to learn"
        )
    return names


def labels_in_words(table: Table, column: str) -> list[str]:
    """The name of each row's class.

    Args:
        table: Of any split.
        column: Of the labels.

    Raises:
        DataError: A label is missing.
    """
    return [_named(table, value, row) for row, value in enumerate(_known(table, column))]


def class_labels(table: Table, column: str, names: Sequence[str]) -> Labels:
    """The class of each row, by its name: splits may number the same classes differently.

    Args:
        table: Of any split.
        column: Of the labels.
        names: Of the classes, in their order.

    Raises:
        DataError: A label is missing, or is not among the classes.
    """
    known = {name: number for number, name in enumerate(names)}
    labels = []
    for row, value in enumerate(_known(table, column)):
        name = _named(table, value, row)
        if name not in known:
            raise DataError(
                f"{table.place}, row {row + 1}: the label {name!r} is not among the {len(names)} "
                f"of the training rows: {listed(names, 5)}{nearest(name, names)}"
            )
        labels.append(known[name])
    return np.array(labels, dtype=np.int64)


def values(table: Table, column: str) -> Labels:
    """The number of each row.

    Args:
        table: Of any split.
        column: Of the labels.

    Raises:
        DataError: One is no finite number.
    """
    return np.array(_each(table, column, _as_value, "a finite number"), dtype=np.float64)


def right_choices(table: Table, column: str, choices: int) -> Labels:
    """The number of each row's right choice.

    Args:
        table: Of any split.
        column: Of the labels.
        choices: How many there are.

    Raises:
        DataError: One is no number of a choice.
    """

    def as_choice(value: Any) -> int | None:
        number = _as_value(value)
        whole = number is not None and number.is_integer() and 0 <= number < choices
        return int(number) if whole and number is not None else None

    wanted = f"the number of a choice from 0 to {choices - 1}"
    return np.array(_each(table, column, as_choice, wanted), dtype=np.int64)


def _each(
    table: Table, column: str, read: Callable[[Any], float | None], wanted: str
) -> list[float]:
    found = []
    for row, value in enumerate(_known(table, column)):
        number = read(value)
        if number is None:
            raise DataError(
                f"{table.place}, row {row + 1}: the label {value!r:.60} is not {wanted}"
            )
        found.append(number)
    return found


def _known(table: Table, column: str) -> Sequence[Any]:
    """The labels, none of which may be missing or hidden."""
    found = table.column(column)
    for row, value in enumerate(found):
        hidden = table.class_names is not None and value == HIDDEN  # a number is one of no class
        if value is None or value == "" or hidden:
            said = "no label" if value is None or value == "" else f"the label {value!r}, hidden"
            raise DataError(
                f"{table.place}, row {row + 1}: has {said}: {column!r} has to be known in every "
                f"row that is trained on or scored"
            )
    return found


def _named(table: Table, value: Any, row: int) -> str:
    names = table.class_names
    if not isinstance(value, str | int | float) or value != value:
        raise DataError(
            f"{table.place}, row {row + 1}: the label {value!r:.60} is no class: text or a number "
            f"is needed"
        )
    if names is None:
        whole = isinstance(value, float) and value.is_integer()
        return str(int(value)) if whole else str(value)
    if isinstance(value, str) and value in names:
        return value
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise DataError(
            f"{table.place}, row {row + 1}: the label {value!r:.60} is no number of the "
            f"{len(names)} classes"
        )
    return names[value]


def _as_value(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
