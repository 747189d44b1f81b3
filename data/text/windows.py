"""Sliding-window evaluation: every token of a split is scored exactly once.

Shapes: B windows of a batch, T tokens of a window.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from polyad.data.errors import DataError
from polyad.data.text.dataset import TokenStream


class Window(NamedTuple):
    """One window: `input_T` predicts `target_T`; `scored_T` marks the targets that count."""

    input_T: torch.Tensor
    target_T: torch.Tensor
    scored_T: torch.Tensor


class WindowBatch(NamedTuple):
    """A batch of windows, stacked."""

    input_BT: torch.Tensor
    target_BT: torch.Tensor
    scored_BT: torch.Tensor


class EvaluationWindows:
    """The windows over the documents of a split, laid end to end.

    An end-of-text token precedes the first window as context, so that the first token is predicted
    like that of any other document; the ends of documents are scored too. Window k begins `stride`
    tokens after window k - 1 and scores its last `stride` targets, each with at least T - stride
    tokens of context; the first window scores all of its targets. If the stream ends inside the
    last window, the window is padded with unscored end-of-text tokens.

    Args:
        stream: The tokens of a split.
        sequence_length: T, tokens of a window.
        stride: Targets scored per window, from 1 (most context, most work) to T (no overlap).
        end_of_text_id: The token that ends each document.
        begin_of_text_id: A token that begins each document and is never scored, since no model has
            to predict it; None if there is none.
        max_windows: Maximum number of windows; None reads the whole split.

    Raises:
        DataError: `stride` is out of its range, or the split is empty.
    """

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        stride: int,
        end_of_text_id: int,
        begin_of_text_id: int | None = None,
        max_windows: int | None = None,
    ) -> None:
        if not 1 <= stride <= sequence_length:
            raise DataError(
                f"stride {stride}: at least 1 and at most the sequence length, {sequence_length}"
            )
        if stream.num_tokens == 0:
            raise DataError(f"{stream.prefix}.bin: no tokens to evaluate on in this split")
        self.sequence_length = sequence_length
        self.stride = stride
        self._stream = stream
        self._end_of_text_id, self._begin_of_text_id = end_of_text_id, begin_of_text_id
        self._max_windows = max_windows

    def __len__(self) -> int:
        """Counts the windows: one, and one more for each further stride, complete or not."""
        behind = max(0, self._stream.num_tokens - self.sequence_length)
        windows = 1 + -(-behind // self.stride)
        return windows if self._max_windows is None else min(windows, self._max_windows)

    def __getitem__(self, window: int) -> Window:
        """Reads a window.

        Args:
            window: Its number, from 0.

        Returns:
            Token ids, int64, and a mask, bool, each of shape (T,).
        """
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        start = window * self.stride
        stop = min(start + self.sequence_length, self._stream.num_tokens)
        length = stop - start
        result = self.empty()
        # Position i of the input is token start + i - 1 of the stream; the token before the stream
        # is the end-of-text token that `empty` has put there.
        targets = torch.from_numpy(self._stream.read(start, stop))
        result.target_T[:length] = targets
        result.input_T[1:length] = targets[: length - 1]
        if start > 0:
            result.input_T[0] = int(self._stream.read(start - 1, start)[0])
        first_scored = 0 if window == 0 else self.sequence_length - self.stride
        result.scored_T[first_scored:length] = True
        if self._begin_of_text_id is not None:
            result.scored_T.logical_and_(result.target_T != self._begin_of_text_id)
        return result

    def empty(self) -> Window:
        """Returns a window without a scored target, to fill a batch with."""
        tokens_T = torch.full((self.sequence_length,), self._end_of_text_id, dtype=torch.int64)
        scored_T = torch.zeros(self.sequence_length, dtype=torch.bool)
        return Window(tokens_T, tokens_T.clone(), scored_T)


class SpreadWindows:
    """A subset of the windows of one split or several, evenly spaced from the first one on.

    Args:
        parts: The windows of each split, all of the same length.
        tokens: The number of full windows is chosen to hold at least this many tokens, if
            available.
    """

    def __init__(self, parts: Sequence[EvaluationWindows], tokens: int) -> None:
        self._parts = tuple(parts)
        self.sequence_length = parts[0].sequence_length
        self._total = sum(len(part) for part in parts)
        self._count = min(self._total, max(1, -(-tokens // self.sequence_length)))

    def __len__(self) -> int:
        """Counts the windows."""
        return self._count

    def __getitem__(self, window: int) -> Window:
        """Reads a window; see `EvaluationWindows.__getitem__`."""
        if not 0 <= window < self._count:
            raise IndexError(f"window {window} of {self._count}")
        number = window * self._total // self._count
        for part in self._parts:
            if number < len(part):
                break
            number -= len(part)
        return part[number]

    def empty(self) -> Window:
        """Returns a window without a scored target, to fill a batch with."""
        return self._parts[0].empty()


def window_batches(
    windows: EvaluationWindows | SpreadWindows, batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[WindowBatch]:
    """Distributes the windows over ranks, which all run the same number of equal forward passes.

    Args:
        windows: The windows.
        batch_size: B, windows of a batch.
        rank: This rank, from 0.
        world_size: Number of ranks that share the evaluation.

    Returns:
        Iterator over ceil(len(windows) / (B * world_size)) batches of tensors of shape (B, T), or
        with fewer rows if one batch has room for all. Each window goes to one rank; unscored
        windows pad the last batches.
    """
    # Not larger than one batch needs: unscored windows take memory.
    most = max(1, math.ceil(len(windows) / world_size))
    batch_size, total = min(batch_size, most), len(windows)
    for begin in range(0, total, batch_size * world_size):
        first = begin + rank * batch_size
        rows = [
            windows[number] if number < total else windows.empty()
            for number in range(first, first + batch_size)
        ]
        yield WindowBatch(*(torch.stack(field) for field in zip(*rows, strict=True)))
