"""Sliding-window evaluation: every token of a split is scored exactly once.

Shapes: B windows of a batch, T tokens of a window.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from polyad.data.errors import DataError
from polyad.data.text.dataset import TokenStream


class WindowBatch(NamedTuple):
    """A batch of windows. A single window has the same fields without B."""

    input_BT: torch.Tensor
    target_BT: torch.Tensor
    """The tokens that the input predicts."""
    scored_BT: torch.Tensor
    """Whether a target counts."""


@dataclass(eq=False)
class EvaluationWindows(Dataset[WindowBatch]):
    """The windows over the documents of a split, laid end to end.

    An end-of-text token precedes the first window as context, so that the first token is predicted
    like that of any other document; the ends of documents are scored too. Window k begins `stride`
    tokens after window k - 1 and scores its last `stride` targets, each with at least T - stride
    tokens of context; the first window scores all of its targets. If the stream ends inside the
    last window, the window is padded with unscored end-of-text tokens.

    Raises:
        DataError: `stride` is out of its range, or the split is empty.
    """

    stream: TokenStream
    """The tokens of a split."""
    sequence_length: int
    """T, tokens of a window."""
    stride: int
    """Targets scored per window, from 1 (most context, most work) to T (no overlap)."""
    end_of_text_id: int
    """The token that ends each document."""
    begin_of_text_id: int | None = None
    """A token that begins each document and is never scored, since no model has to predict it; None
    if there is none."""
    max_windows: int | None = None
    """Maximum number of windows; None reads the whole split."""

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.sequence_length:
            raise DataError(
                f"stride {self.stride}: at least 1 and at most the sequence length, "
                f"{self.sequence_length}"
            )
        if self.stream.num_tokens == 0:
            raise DataError(f"{self.stream.prefix}.bin: no tokens to evaluate on in this split")

    def __len__(self) -> int:
        """Counts the windows: one, and one more for each further stride, complete or not."""
        behind = max(0, self.stream.num_tokens - self.sequence_length)
        windows = 1 + -(-behind // self.stride)
        return windows if self.max_windows is None else min(windows, self.max_windows)

    def __getitem__(self, window: int) -> WindowBatch:
        """Reads a window.

        Args:
            window: Its number, from 0.

        Returns:
            Token ids, int64, and a mask, bool, each of shape (T,).
        """
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        start = window * self.stride
        stop = min(start + self.sequence_length, self.stream.num_tokens)
        length = stop - start
        target_T = torch.full((self.sequence_length,), self.end_of_text_id, dtype=torch.int64)
        input_T = target_T.clone()
        # Position i of the input is token start + i - 1 of the stream; an end-of-text token
        # precedes the stream.
        tokens = torch.from_numpy(self.stream.read(max(0, start - 1), stop))
        target_T[:length] = tokens[-length:]
        input_T[length + 1 - len(tokens) : length] = tokens[:-1]
        scored_T = torch.zeros(self.sequence_length, dtype=torch.bool)
        scored_T[0 if window == 0 else self.sequence_length - self.stride : length] = True
        if self.begin_of_text_id is not None:
            scored_T &= target_T != self.begin_of_text_id
        return WindowBatch(input_T, target_T, scored_T)
