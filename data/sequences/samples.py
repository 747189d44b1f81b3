"""Encodes rows to token ids, and makes samples padded to a common length.

The order of an epoch depends only on the seed and the epoch: a random permutation, in which
sequences of similar length are then grouped, and the groups shuffled. A micro-batch is a
contiguous part of it in any parallel layout, and is padded as a whole. Held-out samples are sorted
by length.

Shapes: N rows, C choices of a row (1 without choices), R = N C sequences, S tokens in total; B
samples of a batch, T tokens of the longest.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyad.data.errors import DataError, prefixed
from polyad.data.sequences.config import Schema
from polyad.data.sequences.tables import Labels, Table
from polyad.data.text.tokenizers.tokenizer import Tokenizer

Ids = list[int]
AT_ONCE = 4096
"""Number of texts that are encoded together."""


class Form(NamedTuple):
    """The special tokens that a model expects around its texts."""

    padding: int
    """The padding token; it is masked everywhere."""
    before: tuple[int, ...] = ()
    """Tokens before the first text."""
    between: tuple[int, ...] = ()
    """Tokens between two texts."""
    after: tuple[int, ...] = ()
    """Tokens after the last text."""
    segments: bool = False
    """Whether the model receives segment ids, which tell two texts apart."""


@dataclass(frozen=True)
class Encoded:
    """The rows of a split: token sequences laid end to end, and labels."""

    ids_S: npt.NDArray[np.int32]
    starts_R1: npt.NDArray[np.int64]
    """Start of each sequence, and the end of the last."""
    second_R: npt.NDArray[np.int32]
    """Number of tokens before the second text of each; the whole length if there is one text."""
    cut: int
    """Number of sequences that were truncated."""
    choices: int
    """C, choices of a row."""
    labels_N: Labels | None
    """Labels, or None if they are hidden."""
    padding: int
    """The padding token."""
    max_length: int
    """The longest sequence, in tokens."""

    def __len__(self) -> int:
        """Counts the rows."""
        return (len(self.starts_R1) - 1) // self.choices

    @property
    def lengths_R(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each sequence."""
        return np.diff(self.starts_R1)

    @property
    def lengths_N(self) -> npt.NDArray[np.int64]:
        """Number of tokens of the longest choice of each row."""
        lengths: npt.NDArray[np.int64] = self.lengths_R.reshape(-1, self.choices).max(1)
        return lengths


def form_of(model_kind: str, tokenizer: Tokenizer) -> Form:
    """Returns the special tokens around texts for a kind of model.

    A decoder was trained on documents that end with its end-of-text token: that token separates two
    texts, and the begin-of-text token, if there is one, precedes the first.
    BERT reads [CLS] first [SEP] second [SEP].

    Args:
        model_kind: `model.kind`.
        tokenizer: The tokenizer of the model.

    Raises:
        DataError: The vocabulary lacks a token that the model needs.
    """
    end = tokenizer.end_of_text_id
    if model_kind != "bert":
        return Form(padding=end, before=tuple(tokenizer.before), between=(end,))
    vocabulary = tokenizer.vocabulary()
    for token in ("[CLS]", "[SEP]", "[PAD]"):
        if token not in vocabulary:
            raise DataError(f"data.tokenizer: has no token {token}, which model.kind: bert needs")
    first, between, padding = (vocabulary[token] for token in ("[CLS]", "[SEP]", "[PAD]"))
    return Form(padding, (first,), (between,), (between,), segments=True)


def encode_rows(
    table: Table,
    schema: Schema,
    tokenizer: Tokenizer,
    form: Form,
    max_length: int,
    labels_N: Labels | None = None,
) -> Encoded:
    """Encodes all rows of a table.

    Args:
        table: The table.
        schema: The roles of its columns.
        tokenizer: The tokenizer.
        form: The special tokens around texts.
        max_length: The longest sequence, in tokens.
        labels_N: The labels of the rows; None if they are hidden.

    Raises:
        DataError: A text is missing, or cannot be encoded.
    """
    texts, seconds = _texts(table, schema)
    each = len(seconds) // len(texts) if seconds else 1
    first = _encode(tokenizer, texts, table.place)
    second = _encode(tokenizer, seconds, table.place) if seconds else [[]] * len(first)
    between = form.between if seconds else ()
    room = max_length - len(form.before) - len(between) - len(form.after)
    sequences: list[Ids] = []
    begins, cut = [], 0
    for number, other in enumerate(second):
        own = first[number // each]
        head, tail = shortened(own, other, room)
        cut += len(head) + len(tail) < len(own) + len(other)
        before = [*form.before, *head, *between]
        sequence = [*before, *tail, *form.after] or [form.padding]
        sequences.append(sequence)
        begins.append(len(before) if seconds else len(sequence))
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    return Encoded(
        ids_S=np.fromiter((i for ids in sequences for i in ids), np.int32, int(lengths.sum())),
        starts_R1=np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]),
        second_R=np.array(begins, dtype=np.int32),
        cut=cut,
        choices=each,
        labels_N=labels_N,
        padding=form.padding,
        max_length=max_length,
    )


def shortened(first: Ids, second: Ids, room: int) -> tuple[Ids, Ids]:
    """Truncates two texts to fit: the longer one first, then both equally, at their ends.

    Args:
        first: A text.
        second: A second text; empty if there is none.
        room: Tokens that fit.
    """
    room = max(room, 0)
    of_second = min(len(second), max(room // 2, room - len(first)))
    return first[: room - of_second], second[:of_second]


def _texts(table: Table, schema: Schema) -> tuple[list[str], list[str]]:
    """Returns the first text of each row, and the second texts: all choices of a row."""
    texts = _strings(table, schema.text)
    pairs = _strings(table, schema.pair) if schema.pair else []
    if not schema.choices:
        return texts, pairs
    choices_NC = zip(*(_strings(table, name) for name in schema.choices), strict=True)
    # A second text is continued by all choices, as in SWAG.
    begins = [f"{pair} " for pair in pairs] or [""] * len(texts)
    rows = zip(begins, choices_NC, strict=True)
    return texts, [begin + choice for begin, choices in rows for choice in choices]


def _strings(table: Table, name: str) -> list[str]:
    texts = table.column(name)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise table.fault(row, f"{name!r} is {text!r:.60}, not a text")
    return texts


def _encode(tokenizer: Tokenizer, texts: Sequence[str], place: str) -> list[Ids]:
    encoded: list[Ids] = []
    for begin in range(0, len(texts), AT_ONCE):
        with prefixed(place):
            encoded += tokenizer.encode_batch(texts[begin : begin + AT_ONCE])
    return encoded


STEP = 8
"""Padded lengths are multiples of this, which is faster on GPUs."""
POOL = 50
"""Number of groups whose sequences are sorted by length together."""


class SequenceBatch(NamedTuple):
    """A micro-batch of sequences. A single sample has the same fields without B."""

    ids_BCT: Tensor
    """Token ids, int64."""
    mask_BCT: Tensor
    """True for real tokens, which precede the padding."""
    second_BCT: Tensor
    """True for the tokens of a second text, including its end token."""
    labels_B: Tensor
    """Classes, right choices (int64), or values (fp32)."""

    @property
    def real_tokens(self) -> Tensor:
        """Number of tokens that are not padding, a scalar."""
        return self.mask_BCT.sum()


class PaddedRows(Dataset[SequenceBatch]):
    """Rows in a given order, padded to one length per micro-batch.

    Args:
        rows: The rows of a split.
        to_longest: Whether a batch is padded to its longest row, not to the longest allowed.
        order_N: The row at each position; None for the rows in file order.
    """

    def __init__(
        self,
        rows: Encoded,
        *,
        to_longest: bool,
        order_N: npt.NDArray[np.integer] | None = None,
    ) -> None:
        self._rows, self._to_longest, self._order_N = rows, to_longest, order_N
        self._lengths_N = rows.lengths_N

    def row_of(self, number: int) -> int:
        """The row of the split that a number stands for."""
        return number if self._order_N is None else int(self._order_N[number])

    def __getitem__(self, number: int) -> SequenceBatch:
        """Returns a single sample, padded to the full length."""
        return self._padded(self.row_of(number), self._rows.max_length)

    def __getitems__(self, numbers: Sequence[int]) -> list[SequenceBatch]:
        """Returns the samples of a batch, all of one length; called by torch's loader."""
        rows = [self.row_of(number) for number in numbers]
        length = self._rows.max_length
        if self._to_longest:
            longest = max(int(self._lengths_N[row]) for row in rows)
            length = min(length, -(-longest // STEP) * STEP)
        return [self._padded(row, length) for row in rows]

    def __len__(self) -> int:
        return len(self._rows if self._order_N is None else self._order_N)

    def _padded(self, row: int, length: int) -> SequenceBatch:
        rows, first = self._rows, row * self._rows.choices
        starts_C1 = rows.starts_R1[first : first + rows.choices + 1]
        place_T, second_C = np.arange(length), rows.second_R[first : first + rows.choices]
        mask_CT = place_T < np.diff(starts_C1)[:, None]
        second_CT = mask_CT & (place_T >= second_C[:, None])
        ids_CT = np.full((rows.choices, length), self._rows.padding, dtype=np.int64)
        ids_CT[mask_CT] = rows.ids_S[starts_C1[0] : starts_C1[-1]]
        # int64 or fp32
        label = torch.tensor(0 if rows.labels_N is None else rows.labels_N[row].item())
        ids, mask, second = map(torch.from_numpy, (ids_CT, mask_CT, second_CT))
        return SequenceBatch(ids, mask, second, label)


class TrainingRows(PaddedRows):
    """Training rows in the order of their epochs, without end.

    Args:
        rows: The rows of the training split.
        to_longest: As in `PaddedRows`.
        seed: The run's seed.
        group: Number of rows of similar length that follow each other; 1 for a random order.
    """

    def __init__(self, rows: Encoded, *, to_longest: bool, seed: int, group: int) -> None:
        super().__init__(rows, to_longest=to_longest)
        self._seed, self._group = seed, group

    def row_of(self, number: int) -> int:
        """Returns the row of a sample, by its global number."""
        epoch, place = divmod(number, len(self._rows))
        return int(self._order(epoch)[place])

    @functools.lru_cache(maxsize=2)  # noqa: B019  # a batch may straddle two epochs; a run has one
    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        generator = np.random.Generator(np.random.PCG64((self._seed, epoch)))
        return grouped_order(self._lengths_N, self._group, generator)


def grouped_order(
    lengths_N: npt.NDArray[np.integer], group: int, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draws a random order in which rows of similar length are adjacent.

    A random permutation is cut into pools, each sorted by length and cut into groups; the groups
    are shuffled. An incomplete last group stays last, so that groups start at multiples of their
    size.

    Returns:
        [N], each row once.
    """
    order_N = generator.permutation(len(lengths_N))
    if group == 1:
        return order_N
    pool = POOL * group
    pools = [order_N[begin : begin + pool] for begin in range(0, len(order_N), pool)]
    # Stable: rows of equal length keep their random order.
    sorted_N = np.concatenate([p[np.argsort(lengths_N[p], kind="stable")] for p in pools])
    whole = len(sorted_N) // group * group
    groups = sorted_N[:whole].reshape(-1, group)[generator.permutation(whole // group)]
    return np.concatenate([groups.reshape(-1), sorted_N[whole:]])
