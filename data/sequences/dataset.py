"""Opens labelled sequences: tables, classes and the token ids of each split."""

import functools
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from polyad.data.errors import DataError, listed
from polyad.data.sequences.config import ALLOWED_METRICS, Schema, SequenceDataConfig
from polyad.data.sequences.samples import (
    Encoded,
    Form,
    PaddedRows,
    TrainingRows,
    encode_rows,
    form_of,
)
from polyad.data.sequences.tables import Labels, Table, read_tables
from polyad.data.text.tokenizers.tokenizer import Tokenizer

HOLD_OUT = "data.held_out: 0.1 holds a tenth of the training rows out"
"""What to do if there is no validation split."""


class SequenceData:
    """The splits of a source, each encoded when it is first used.

    Args:
        settings: The settings of the data.
        tokenizer: The tokenizer of the model.
        model_kind: `model.kind`.
        max_length: The longest sequence, in tokens.
        classes: The classes of a checkpoint; None: taken from the training rows.

    Attributes:
        schema: The schema of the columns.
        class_names: The class names in order; empty if there are no classes.
        has_segments: Whether the model receives segment ids, which tell two texts apart.
        notes: Notes for the user on what was not read, one per line.
        left_out: Names of the domains that are not trained on: none.

    Raises:
        DataError: A split used for training or validation has no labels, labels differ between
            splits, there is only one class, or a setting does not fit the task or the rows.
    """

    left_out: Sequence[str] = ()

    def __init__(
        self,
        settings: SequenceDataConfig,
        tokenizer: Tokenizer,
        *,
        model_kind: str,
        max_length: int,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.settings, self.tokenizer, self.max_length = settings, tokenizer, max_length
        self.schema: Schema = settings.schema_of
        _check_task(self.schema)
        self._form: Form = form_of(model_kind, tokenizer)
        least = len(self._form.before + self._form.between + self._form.after) + 2
        if max_length < least:
            raise DataError(
                f"data.max_length: {max_length} is less than the {least} tokens of the shortest "
                f"sequence"
            )
        self.has_segments = self._form.segments
        self._to_longest = settings.padding == "longest"
        tables, self.notes = read_tables(settings.path, self.schema)
        if settings.held_out and "train" in tables and "validation" not in tables:
            tables["train"], tables["validation"] = tables["train"].held_out(settings.held_out)
        self._tables = tables
        self.class_names: list[str] = []
        if self.schema.task == "classification":
            if not classes and "train" not in tables:
                raise DataError(f"{settings.path}: has no split 'train'")
            self.class_names = list(classes or tables["train"].classes(self.schema.label))
        else:
            self._check_numbers()
        self._labels = {
            name: self._labels_of(table)
            for name, table in self._tables.items()
            if name != "test" or not table.labels_are_hidden(self.schema.label)
        }

    @property
    def splits(self) -> list[str]:
        """Names of the available splits."""
        return list(self._tables)

    @property
    def choices(self) -> int:
        """Number of sequences per sample: its choices, or 1."""
        return len(self.schema.choices or [None])

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

    def domains(self, name: str) -> list[str] | None:
        """Returns the domain of each row of a split; None if rows have no domains."""
        column = self.schema.domain
        return None if column is None else self._tables[name].domains(column)

    @functools.cache  # noqa: B019  # a run has one
    def encoded(self, name: str) -> Encoded:
        """The rows of a split as token ids, with their labels."""
        self.check_split(name)
        return encode_rows(
            self._tables[name],
            self.schema,
            self.tokenizer,
            self._form,
            self.max_length,
            self._labels[name],
        )

    @functools.cache  # noqa: B019  # a run has one
    def contents(self, split: str) -> str:
        """Digests the token ids and labels of a split, and the classes.

        Args:
            split: A split with known labels.
        """
        rows = self.encoded(split)
        assert rows.labels_N is not None
        about = [self.schema.task, self.class_names, rows.choices]
        digest = hashlib.sha256(json.dumps(about).encode())
        for array in (rows.ids_S, rows.starts_R1, rows.labels_N):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def training(self, seed: int) -> TrainingRows:
        """Returns the training rows by their global number.

        Args:
            seed: The seed of their order.
        """
        return TrainingRows(
            self.encoded("train"),
            to_longest=self._to_longest,
            seed=seed,
            group=self.settings.group_by_length,
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
        return PaddedRows(rows, to_longest=self._to_longest, order_N=order_N)

    def _check_numbers(self) -> None:
        """Checks that numbers mean the same in all splits."""
        label = self.schema.label
        first, *others = self._tables.values()
        for table in others:
            if table.class_names(label) != first.class_names(label):
                raise DataError(
                    f"{table.place}: the numbers of {label!r} have other names than in "
                    f"{first.place}; with data.task: {self.schema.task} they have to mean the same"
                )

    def _labels_of(self, table: Table) -> Labels:
        column = self.schema.label
        if self.schema.task == "classification":
            return table.class_labels(column, self.class_names)
        is_choice = self.schema.task == "multiple_choice"
        return table.numeric_labels(column, self.choices if is_choice else None)


def _check_task(schema: Schema) -> None:
    """Checks that metrics and choices belong to the task."""
    allowed = ALLOWED_METRICS[schema.task]
    if wrong := next((metric for metric in schema.metrics if metric not in allowed), None):
        raise DataError(
            f"data.metrics: {wrong!r} is not allowed with data.task: {schema.task}; allowed: "
            f"{', '.join(allowed)}"
        )
    if bool(schema.choices) != (schema.task == "multiple_choice"):
        raise DataError(
            f"data.columns.choices: {schema.choices or 'null'} is not allowed with "
            f"data.task: {schema.task}; choices belong to multiple_choice, and only to it"
        )
