"""Labels of a table as numbers, and domains of its rows, some of which may be left out.

A label is a class, a value, or the index of the right choice; another column holds the domain.

Shapes: N rows.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, listed, nearest
from polyad.data.names import check_classes, check_leave_out
from polyad.data.prepared import SPLITS
from polyad.data.sequences.config import HIDDEN_LABEL, Schema
from polyad.data.sequences.tables import Table, held_out, joined

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
    values = table.columns.get(column)
    return values is None or all(str(value) in _HIDDEN for value in values)


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
    found = set(labels_in_words(table, column))
    if table.class_names is not None:
        names = list(table.class_names)
    else:
        numbers = all(re.fullmatch(r"-?\d{1,18}", name) for name in found)
        names = sorted(sorted(found), key=int) if numbers else sorted(found)  # for example 1 and 01
    if len(found) < 2:
        raise DataError(
            f"{table.place}: all {len(table):,} rows have the label {next(iter(found))!r}: with "
            f"one class there is nothing to learn"
        )
    return names


def labels_in_words(table: Table, column: str) -> list[str]:
    """Returns the name of each row's class.

    Args:
        table: The table of any split.
        column: The column of the labels.

    Raises:
        DataError: A label is missing.
    """
    return [_named(table, value, row) for row, value in enumerate(_known(table, column))]


def class_labels(table: Table, column: str, names: Sequence[str]) -> Labels:
    """Returns the class of each row, matched by name: splits may number classes differently.

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
    """Returns the numeric label of each row.

    Args:
        table: The table of any split.
        column: The column of the labels.

    Raises:
        DataError: A label is not a finite number.
    """
    return np.array(_each(table, column, _as_value, "a finite number"), dtype=np.float64)


def right_choices(table: Table, column: str, choices: int) -> Labels:
    """Returns the index of each row's right choice.

    Raises:
        DataError: A label is not the index of a choice.
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
    """Returns the labels, after checking that none is missing or hidden."""
    found = table.column(column)
    for row, value in enumerate(found):
        # Without class names, -1 is an ordinary value.
        hidden = table.class_names is not None and value == HIDDEN_LABEL
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
            f"{table.place}, row {row + 1}: the label {value!r:.60} is not a class: it must be "
            "text or a number"
        )
    if names is None:
        whole = isinstance(value, float) and value.is_integer()
        return str(int(value)) if whole else str(value)
    if isinstance(value, str) and value in names:
        return value
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise DataError(
            f"{table.place}, row {row + 1}: the label {value!r:.60} is not the number of one of "
            f"the {len(names)} classes"
        )
    return names[value]


def _as_value(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


TEST = "test"


def domains_of(table: Table, column: str) -> list[str]:
    """Returns the domain of each row.

    Args:
        table: The table of any split.
        column: The column of the domains.

    Raises:
        DataError: The column does not exist, or a cell is empty.
    """
    words = [_word(value) for value in table.column(column)]
    if "" in words:
        raise DataError(
            f"{table.place}, row {words.index('') + 1}: has no domain: {column!r} "
            f"(data.columns.domain) has to be known in every row"
        )
    return words


def _word(value: Any) -> str:
    if value is None or value != value:  # NaN marks empty cells in numeric tables
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def held_out_of_each(table: Table, column: str, share: float) -> tuple[Table, Table]:
    """Holds rows out, evenly within each domain; the choice is deterministic.

    Returns:
        The remaining rows and the held-out rows, each in their order.
    """
    numbers: dict[str, list[int]] = {}
    for number, domain in enumerate(domains_of(table, column)):
        numbers.setdefault(domain, []).append(number)
    # `held_out` works on a table, so the row numbers are passed as a table with one column.
    parts = [held_out(replace(table, columns={"row": rows}), share) for rows in numbers.values()]
    stay, out = (sorted(n for pair in parts for n in pair[side].column("row")) for side in (0, 1))
    return table.rows(stay), replace(table.rows(out), place=f"{table.place} (held out)")


def without_domains(
    tables: Mapping[str, Table], schema: Schema, leave_out: Sequence[str] | None, path: str
) -> dict[str, Table]:
    """Leaves domains out: their rows form the test split and appear in no other.

    Args:
        tables: The tables of the splits of the source.
        schema: The schema of the columns.
        leave_out: Names of domains; None for none.
        path: The source's name in errors.

    Returns:
        The new splits; unchanged without `leave_out`.

    Raises:
        DataError: A row has no domain, or these domains cannot be left out.
    """
    of_rows: dict[str, list[str]] = {}
    if schema.domain:
        of_rows = {split: domains_of(table, schema.domain) for split, table in tables.items()}
    known = sorted({domain for each in of_rows.values() for domain in each})
    check_leave_out(
        leave_out, known, f"data.path: {path}", "data.columns.domain, a column that names them"
    )
    if leave_out is None:
        return dict(tables)
    left: dict[str, Table] = {}
    for split, table in tables.items():
        domains = of_rows[split]
        if split != TEST:
            stay = [row for row, domain in enumerate(domains) if domain not in leave_out]
            if not stay:
                raise DataError(
                    f"data.leave_out: {', '.join(leave_out)} are all the domains of {table.place}, "
                    f"which leaves no row to {'train on' if split == 'train' else 'validate with'}"
                )
            place = f"{table.place} (domains that are trained on)"
            left[split] = replace(table.rows(stay), place=place)
    left[TEST] = _left_out(tables, of_rows, schema, leave_out)
    if schema.task == "classification" and "train" in left:
        trained = set(labels_in_words(left["train"], schema.label))
        assert schema.domain is not None
        rows = zip(
            domains_of(left[TEST], schema.domain),
            labels_in_words(left[TEST], schema.label),
            strict=True,
        )
        classes: dict[str, set[str]] = {}
        for domain, label in rows:
            classes.setdefault(domain, set()).add(label)
        for domain in sorted(classes):
            check_classes(domain, classes[domain], trained)
    return {split: left[split] for split in SPLITS if split in left}


def _left_out(
    tables: Mapping[str, Table],
    of_rows: Mapping[str, Sequence[str]],
    schema: Schema,
    leave_out: Sequence[str],
) -> Table:
    """Returns all rows of the domains left out that have a known label."""
    parts = []
    for split, table in tables.items():
        if not labels_are_hidden(table, schema.label):
            inside = [row for row, domain in enumerate(of_rows[split]) if domain in leave_out]
            parts.append(table.rows(inside))
    if not any(len(part) for part in parts):
        raise DataError(f"data.leave_out: {', '.join(leave_out)}: no row of it has a known label")
    place = " and ".join(part.place for part in parts if len(part))
    return replace(joined(parts, schema.label), place=f"{place} (domains left out)")
