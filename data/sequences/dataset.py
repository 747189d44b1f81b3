"""Opens labelled sequences: tables, classes and the token ids of each split."""

import functools
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from polyad.data.errors import DataError, listed
from polyad.data.sequences.config import ALLOWED_METRICS, Schema, SequenceDataConfig
from polyad.data.sequences.labels import (
    Labels,
    class_labels,
    class_names,
    domains_of,
    held_out_of_each,
    labels_are_hidden,
    right_choices,
    values,
    without_domains,
)
from polyad.data.sequences.samples import (
    Encoded,
    Form,
    PaddedRows,
    TrainingRows,
    encode_rows,
    form_of,
)
from polyad.data.sequences.tables import Table, held_out, read_tables
from polyad.data.text.tokenizers.tokenizer import Tokenizer

HOLD_OUT = "data.held_out: 0.1 holds a tenth of the training rows out"
"""What to do if there is no validation split."""


class SequenceData:
    """The splits of a source, each encoded when it is first used.

    Args:
        settings: The settings of the data.
        tables: The tables of the splits.
        tokenizer: The tokenizer of the model.
        model_kind: `model.kind`.
        max_length: The longest sequence, in tokens.
        known_classes: The classes of a checkpoint; None: taken from the training rows.

    Attributes:
        schema: The schema of the columns.
        class_names: The class names in order; empty if there are no classes.
        has_segments: Whether the model receives segment ids, which tell two texts apart.

    Raises:
        DataError: A split used for training or validation has no labels, labels differ between
            splits, or there is only one class.
    """

    def __init__(
        self,
        settings: SequenceDataConfig,
        tables: dict[str, Table],
        tokenizer: Tokenizer,
        *,
        model_kind: str,
        max_length: int,
        known_classes: Sequence[str] | None = None,
    ) -> None:
        self.settings, self.tokenizer, self.max_length = settings, tokenizer, max_length
        self.schema: Schema = settings.schema_of
        self._tables = tables
        self._form: Form = form_of(model_kind, tokenizer)
        least = len(self._form.before + self._form.between + self._form.after) + 2
        if max_length < least:
            raise DataError(
                f"data.max_length: {max_length} is less than the {least} tokens of the shortest "
                f"sequence"
            )
        self.has_segments = self._form.segments
        self.class_names: list[str] = []
        if self.schema.task == "classification":
            self.class_names = self._classes(known_classes)
        else:
            self._check_numbers()
        self._labels = {
            name: self._labels_of(table)
            for name, table in tables.items()
            if name != "test" or not labels_are_hidden(table, self.schema.label)
        }

    @classmethod
    def open(
        cls,
        settings: SequenceDataConfig,
        tokenizer: Tokenizer,
        *,
        model_kind: str,
        max_length: int,
        known_classes: Sequence[str] | None = None,
    ) -> "SequenceData":
        """Reads the tables, and holds rows out if requested; see the class."""
        schema = settings.schema_of
        for metric in schema.metrics:
            if metric not in (allowed := ALLOWED_METRICS[schema.task]):
                raise DataError(
                    f"data.metrics: {metric!r} is not allowed with data.task: {schema.task}; "
                    f"allowed: {', '.join(allowed)}"
                )
        if bool(schema.choices) != (schema.task == "multiple_choice"):
            raise DataError(
                f"data.columns.choices: {list(schema.choices) or 'null'} is not allowed with "
                f"data.task: {schema.task}; choices belong to multiple_choice, and only to it"
            )
        tables = read_tables(settings.path, schema)
        for table in tables.values():
            if table.present:
                table.column(schema.text)  # else the table would seem to have no rows
            if not len(table):
                raise DataError(f"{table.place}: has no rows")
        if settings.held_out and "train" in tables and "validation" not in tables:
            train, share = tables["train"], settings.held_out
            tables["train"], tables["validation"] = (
                held_out_of_each(train, schema.domain, share)
                if schema.domain
                else held_out(train, share)
            )
        tables = without_domains(tables, schema, settings.leave_out, settings.path)
        return cls(
            settings,
            tables,
            tokenizer,
            model_kind=model_kind,
            max_length=max_length,
            known_classes=known_classes,
        )

    @property
    def splits(self) -> list[str]:
        """Names of the available splits."""
        return list(self._tables)

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how tables were read, one per line."""
        return [table.note for table in self._tables.values() if table.note]

    @property
    def choices(self) -> int:
        """Number of sequences per sample: its choices, or 1."""
        if len(self.schema.choices) != 1:
            return max(1, len(self.schema.choices))
        table = next(iter(self._tables.values()))
        first = table.column(self.schema.choices[0])[0]
        return len(first) if isinstance(first, list) else 1

    def check_split(self, name: str) -> None:
        """Checks that a split exists and has labels.

        Raises:
            DataError: It does not, or its labels are hidden.
        """
        if name not in self._tables:
            way = f"; {HOLD_OUT}" if name == "validation" and "train" in self._tables else ""
            there = listed(self._tables)
            raise DataError(f"{self.settings.path}: has no split {name!r}; there are {there}{way}")
        if name not in self._labels:
            raise DataError(
                f"{self._tables[name].place}: its labels are hidden, so nothing can be scored"
            )

    def size(self, name: str) -> int:
        """The number of rows of a split."""
        self.check_split(name)
        return len(self._tables[name])

    @property
    def left_out(self) -> list[str]:
        """Names of the domains that are not trained on."""
        return self.settings.leave_out or []

    def domains(self, name: str) -> list[str] | None:
        """Returns the domain of each row of a split; None if rows have no domains."""
        column = self.schema.domain
        return None if column is None else domains_of(self._tables[name], column)

    @functools.cache  # noqa: B019  # a run has one
    def encoded(self, name: str) -> Encoded:
        """The rows of a split as token ids, with their labels."""
        self.check_split(name)
        pieces = encode_rows(
            self._tables[name], self.schema, self.tokenizer, self._form, self.max_length
        )
        return Encoded(pieces, self._labels[name], self.choices)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The `contents` of the training rows."""
        return self.contents("train")

    def contents(self, split: str) -> str:
        """Digests the token ids and labels of a split, the classes, and the domains left out.

        Args:
            split: A split with known labels.
        """
        return self._digest(split, self.class_names)

    def is_of(self, fingerprint: str) -> bool:
        """Returns whether a fingerprint matches these rows, including older ones without names."""
        numbered = _numbers(len(self.class_names))
        return fingerprint in (self.fingerprint, self._digest("train", numbered))

    def _digest(self, split: str, class_names: Sequence[str]) -> str:
        rows, digest = self.encoded(split), hashlib.sha256()
        assert rows.labels_N is not None
        digest.update(json.dumps([self.schema.task, class_names, rows.choices]).encode())
        if self.left_out:
            digest.update(json.dumps(self.left_out).encode())
        for array in (rows.pieces.ids_S, rows.pieces.starts_R1, rows.labels_N):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def training(self, seed: int) -> TrainingRows:
        """Returns the training rows by their global number.

        Args:
            seed: The seed of their order.
        """
        return TrainingRows(
            self.encoded("train"),
            seed=seed,
            group=self.settings.group_by_length,
            padding=self._form.padding,
            length=self.max_length,
            to_longest=self.settings.padding == "longest",
        )

    def held_out(self, name: str, most: int | None = None) -> PaddedRows:
        """Returns the rows of a split, from the shortest to the longest.

        Args:
            name: The name of the split.
            most: Maximum number of rows, chosen evenly by length; None for all.
        """
        rows = self.encoded(name)
        order_N = rows.lengths_N.argsort(kind="stable")
        if most is not None and most < len(rows):
            order_N = order_N[np.arange(most) * len(rows) // most]
        return PaddedRows(
            rows,
            order_N,
            padding=self._form.padding,
            length=self.max_length,
            to_longest=self.settings.padding == "longest",
        )

    def _classes(self, known: Sequence[str] | None) -> list[str]:
        train = self._tables.get("train")
        if known:
            # In checkpoints of older versions, class names are the numbers of the training rows.
            named = train and train.class_names
            return list(named if named and list(known) == _numbers(len(named)) else known)
        if train is None:
            raise DataError(f"{self.settings.path}: has no split 'train'")
        return class_names(train, self.schema.label)

    def _check_numbers(self) -> None:
        """Checks that numeric class labels mean the same in all splits."""
        first = next(iter(self._tables.values()))
        for table in self._tables.values():
            if table.class_names != first.class_names:
                raise DataError(
                    f"{table.place}: its labels are called {listed(table.class_names or (), 5)}, "
                    f"those of {first.place} {listed(first.class_names or (), 5)}: with data.task: "
                    f"{self.schema.task} numbers have to mean the same in all splits"
                )

    def _labels_of(self, table: Table) -> Labels:
        column = self.schema.label
        if self.schema.task == "classification":
            return class_labels(table, column, self.class_names)
        if self.schema.task == "regression":
            return values(table, column)
        return right_choices(table, column, self.choices)


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]
