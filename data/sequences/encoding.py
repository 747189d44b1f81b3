"""Rows to token ids: what stands around a text and between two, and what is cut off.

Shapes: N rows, C choices of a row (1 without choices), R = N C sequences, S tokens of all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError
from polyad.data.sequences.schemas import Schema
from polyad.data.sequences.tables import Table
from polyad.data.text.tokenizers.tokenizer import Tokenizer, all_cores

Ids = list[int]
AT_ONCE = 4096
"""Texts that are encoded together."""


class Form(NamedTuple):
    """What a model wants around its texts."""

    padding: int
    """The token that fills up; it is masked everywhere."""
    before: tuple[int, ...] = ()
    """Before the first text."""
    between: tuple[int, ...] = ()
    """Between two texts."""
    after: tuple[int, ...] = ()
    """After the last text."""
    segments: bool = False
    """Whether the model is told which text a token is of."""


class Pieces(NamedTuple):
    """Sequences of tokens end to end."""

    ids_S: npt.NDArray[np.int32]
    starts_R1: npt.NDArray[np.int64]
    """Where each begins, and the end of the last."""
    second_R: npt.NDArray[np.int32]
    """Tokens of each before its second text begins; all of it where there is one text."""
    cut: int
    """How many were cut off for their length."""

    @property
    def lengths_R(self) -> npt.NDArray[np.int64]:
        """Tokens of each."""
        return np.diff(self.starts_R1)


def form_of(model_kind: str, tokenizer: Tokenizer) -> Form:
    """What stands around texts for a kind of model.

    GPT-2 was trained on documents that end with its end-of-text token: two texts have it between
    them. BERT reads [CLS] first [SEP] second [SEP].

    Args:
        model_kind: `model.kind`.
        tokenizer: Of the model.

    Raises:
        DataError: The vocabulary lacks a token that the model needs.
    """
    end = tokenizer.end_of_text_id
    if model_kind != "bert":
        return Form(padding=end, between=(end,))
    vocabulary = tokenizer.vocabulary()
    for token in ("[CLS]", "[SEP]", "[PAD]"):
        if token not in vocabulary:
            raise DataError(f"data.tokenizer: has no token {token}, which model.kind: bert needs")
    first, between, padding = (vocabulary[token] for token in ("[CLS]", "[SEP]", "[PAD]"))
    return Form(padding, (first,), (between,), (between,), segments=True)


def encode_rows(
    table: Table, schema: Schema, tokenizer: Tokenizer, form: Form, max_length: int
) -> Pieces:
    """Encodes all rows of a table.

    Args:
        table: With the columns of the schema.
        schema: Of the columns.
        tokenizer: Of the model.
        form: What stands around texts.
        max_length: Tokens after which a sequence is cut off: of two texts the longer one first.

    Raises:
        DataError: A text is missing, or cannot be encoded.
    """
    texts, seconds = _texts(table, schema)
    each = len(seconds) // len(texts) if seconds else 1
    first = _encode(tokenizer, texts, table.place)
    second = _encode(tokenizer, seconds, table.place) if seconds else []
    room = max_length - len(form.before) - len(form.after)
    sequences: list[Ids] = []
    begins, cut = [], 0
    for number in range(len(texts) * each):
        own, other = first[number // each], second[number] if seconds else None
        head, tail = shortened(own, other, room - (0 if other is None else len(form.between)))
        cut += len(head) + len(tail) < len(own) + len(other or ())
        before = [*form.before, *head, *(form.between if other is not None else ())]
        sequence = [*before, *tail, *form.after]
        sequences.append(sequence or [form.padding])
        begins.append(len(before) if other is not None else len(sequences[-1]))
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    return Pieces(
        ids_S=np.fromiter((i for ids in sequences for i in ids), np.int32, int(lengths.sum())),
        starts_R1=np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]),
        second_R=np.array(begins, dtype=np.int32),
        cut=cut,
    )


def shortened(first: Ids, second: Ids | None, room: int) -> tuple[Ids, Ids]:
    """Cuts off what does not fit: tokens of the longer text first, the ends of both alike.

    Args:
        first: A text.
        second: Another one, if there is.
        room: Tokens that fit.
    """
    room = max(room, 0)
    if second is None:
        return first[:room], []
    of_second = min(len(second), max(room // 2, room - len(first)))
    return first[: room - of_second], second[:of_second]


def _texts(table: Table, schema: Schema) -> tuple[list[str], list[str]]:
    """The first text of each row, and the second ones: of a row all of its choices."""
    texts = _strings(table, schema.text)
    pairs = _strings(table, schema.pair) if schema.pair else None
    if not schema.choices:
        return texts, pairs or []
    if len(schema.choices) == 1:
        lists = table.column(schema.choices[0])
        count = len(lists[0]) if len(lists) and isinstance(lists[0], Sequence) else 0
        for row, choices in enumerate(lists):
            whole = isinstance(choices, list) and all(isinstance(c, str) for c in choices)
            if not whole or len(choices) != count or count < 2:
                raise DataError(
                    f"{table.place}, row {row + 1}: {schema.choices[0]!r} is {choices!r:.60}, not "
                    f"a list of two or more texts, as many as in the first row"
                )
        choices_NC = [list(choices) for choices in lists]
    else:
        columns = [_strings(table, name) for name in schema.choices]
        choices_NC = [list(choices) for choices in zip(*columns, strict=True)]
    if pairs is not None:  # as in SWAG, where each choice goes on with the same words
        choices_NC = [
            [f"{pair} {choice}" for choice in choices]
            for pair, choices in zip(pairs, choices_NC, strict=True)
        ]
    return texts, [choice for choices in choices_NC for choice in choices]


def _strings(table: Table, name: str) -> list[str]:
    found = table.column(name)
    for row, text in enumerate(found):
        if not isinstance(text, str):
            raise DataError(f"{table.place}, row {row + 1}: {name!r} is {text!r:.60}, not a text")
    return list(found)


def _encode(tokenizer: Tokenizer, texts: Sequence[str], place: str) -> list[Ids]:
    encoded: list[Ids] = []
    with all_cores():
        for begin in range(0, len(texts), AT_ONCE):
            try:
                encoded += tokenizer.encode_batch(texts[begin : begin + AT_ONCE])
            except DataError as error:
                raise DataError(f"{place}: {error}") from None
    return encoded
