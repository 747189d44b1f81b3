"""Domains of rows, told by a column, and the splits of which some are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyad.data.domains import check_classes, check_leave_out
from polyad.data.errors import DataError
from polyad.data.sequences.labels import is_hidden, labels_in_words
from polyad.data.sequences.schemas import SPLITS, Schema
from polyad.data.sequences.tables import Table, held_out, joined

TEST = "test"


def domains_of(table: Table, column: str) -> list[str]:
    """The domain of each row.

    Args:
        table: Of any split.
        column: Of the domains.

    Raises:
        DataError: There is no such column, or a cell is empty.
    """
    words = [_word(value) for value in table.column(column)]
    if "" in words:
        raise DataError(
            f"{table.place}, row {words.index('') + 1}: has no domain: {column!r} "
            f"(data.columns.domain) has to be known in every row"
        )
    return words


def _word(value: Any) -> str:
    if value is None or value != value:  # NaN, as tables of numbers say that nothing is there
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def held_out_of_each(table: Table, column: str, share: float) -> tuple[Table, Table]:
    """Takes rows out evenly within each domain, always the same ones.

    Args:
        table: Of all rows.
        column: Of the domains.
        share: Of the rows of each domain that are held out.

    Returns:
        The rows that stay, and the others, in their order.
    """
    numbers: dict[str, list[int]] = {}
    for number, domain in enumerate(domains_of(table, column)):
        numbers.setdefault(domain, []).append(number)
    # The number of a row is what is dealt out: a table with this one column.
    parts = [held_out(replace(table, columns={"row": rows}), share) for rows in numbers.values()]
    stay, out = (sorted(n for pair in parts for n in pair[side].column("row")) for side in (0, 1))
    return table.rows(stay), replace(table.rows(out), place=f"{table.place} (held out)")


def without_domains(
    tables: Mapping[str, Table], schema: Schema, leave_out: Sequence[str] | None, path: str
) -> dict[str, Table]:
    """The splits with domains left out: rows of these are the test split, and nowhere else.

    Args:
        tables: Of the splits of the source.
        schema: Of the columns.
        leave_out: Names of domains; None: none.
        path: Names the source in errors.

    Returns:
        The splits; without `leave_out` as they are.

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
    """All rows of the domains left out whose labels are known."""
    parts = []
    for split, table in tables.items():
        if not is_hidden(table, schema.label):
            inside = [row for row, domain in enumerate(of_rows[split]) if domain in leave_out]
            parts.append(table.rows(inside))
    if not any(len(part) for part in parts):
        raise DataError(
            f"data.leave_out: {', '.join(leave_out)}: no row of it has a label that is known"
        )
    place = " and ".join(part.place for part in parts if len(part))
    return replace(joined(parts, schema.label), place=f"{place} (domains left out)")
