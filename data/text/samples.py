"""Samples of text: to train on, from one prepared folder or several mixed by weight; and windows.

Their order depends only on the seed. A folder's documents, end to end in the order of its file, are
cut into samples; epoch e reads these in a random order seeded by (seed, e). Samples of all epochs
are numbered consecutively without end.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset
from xxhash import xxh3_64_intdigest

from polyad.data.config import DataConfig
from polyad.data.errors import DataError, prefixed
from polyad.data.text.dataset import PreparedData, TokenStream
from polyad.data.text.manifest import TokenizerInfo

_ROUNDS = 4
_LEAST_HALF = 3
"""Bits of half a number: with fewer, four rounds favour some permutations."""


def shuffled(number: int, count: int, key: str) -> int:
    """Permutes the numbers below `count`, one at a time, in constant time and memory.

    A cycle-walking Feistel network (Black & Rogaway 2002, "Ciphers with arbitrary finite
    domains"): a permutation of the next larger power of four, repeated until the result is small
    enough.

    Args:
        number: At least 0 and below `count`.
        count: How many numbers are permuted.
        key: Names the permutation.

    Returns:
        The number at that place of the permutation.
    """
    half = max(_LEAST_HALF, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for round_ in range(_ROUNDS):
            mixed = xxh3_64_intdigest(f"{key}/{round_}/{right}".encode())
            left, right = right, left ^ (mixed & mask)
        number = left << half | right
        if number < count:
            return number


class TrainingSamples(Dataset[torch.Tensor]):
    """An infinite sequence of samples: sample g is number g % n of epoch g // n.

    The last token of a sample is the first of the next in the file: every token except the very
    first is a target exactly once in an epoch. Tokens at the end that do not fill a sample are left
    out.

    Args:
        stream: The tokens of a split.
        sequence_length: Targets of a sample, T, in tokens.
        seed: Not negative; determines the order.

    Attributes:
        samples_per_epoch: n, the same in every epoch: (tokens - 1) // T.

    Raises:
        DataError: The split is shorter than one sample.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int) -> None:
        if stream.num_tokens < sequence_length + 1:
            raise DataError(
                f"{stream.prefix}.bin: {stream.num_tokens:,} tokens, but one sample of sequence "
                f"length {sequence_length:,} needs {sequence_length + 1:,}; prepare more text or "
                "shorten the sequence"
            )
        self.samples_per_epoch = (stream.num_tokens - 1) // sequence_length
        self._stream, self._sequence_length, self._seed = stream, sequence_length, seed

    def __getitem__(self, sample: int) -> torch.Tensor:
        """Reads a sample.

        Args:
            sample: Its global number, from 0.

        Returns:
            T + 1 token ids, int64, shape (T + 1,): the inputs are all but the last, the targets
            all but the first.
        """
        start, stop = self._bounds(sample)
        return torch.from_numpy(self._stream.read(start, stop))

    def documents(self, sample: int) -> list[int]:
        """Lists the documents that a sample has tokens of.

        Args:
            sample: Its global number, from 0.

        Returns:
            Their numbers in the split, from 0, ascending. The last one may contribute only the last
            target.
        """
        start, stop = self._bounds(sample)
        (first, last), _ = self._stream.locate(np.array([start, stop - 1]))
        return list(range(int(first), int(last) + 1))

    def _bounds(self, sample: int) -> tuple[int, int]:
        """Returns the positions in the stream of a sample's first token and of its end."""
        epoch, position = divmod(sample, self.samples_per_epoch)
        number = shuffled(position, self.samples_per_epoch, f"{self._seed}/{epoch}")
        start = number * self._sequence_length
        return start, start + self._sequence_length + 1


BLOCK = 2**17
"""Number of samples after which the order of sources repeats; shares are exact to 1 / BLOCK."""
_SOURCES = 2  # the last word of the random stream's seed


class Part(NamedTuple):
    """One prepared folder of the data.

    Attributes:
        name: The name under which its validation loss is reported.
        share: Its share of the samples; all shares sum to 1.
        data: The prepared folder.
    """

    name: str
    share: float
    data: PreparedData


@dataclass(frozen=True)
class TrainingData:
    """The opened and checked data of a run: one prepared folder or several. Use `open`."""

    parts: Sequence[Part]
    """At least one, in the order of the configuration."""
    key: str
    """The configuration key that names them, for errors."""

    @classmethod
    def open(cls, config: DataConfig) -> "TrainingData":
        """Opens what `data.path` or `data.mixture` names.

        Args:
            config: The keys under `data:`.

        Returns:
            The data.

        Raises:
            DataError: No folder is named, one is missing or damaged, two were made with different
                tokenizers, or a weight is too small relative to the others.
        """
        if config.mixture is None:
            if config.path is None:
                raise DataError(
                    "data.path: is missing; create a folder of prepared data with `polyad prepare`"
                )
            data = _open(config.path, "data.path")
            return cls([Part(Path(config.path).name, 1.0, data)], "data.path")
        total = sum(source.weight for source in config.mixture)
        parts: list[Part] = []
        for number, source in enumerate(config.mixture):
            key = f"data.mixture.{number}"
            part = Part(source.label, source.weight / total, _open(source.path, f"{key}.path"))
            if part.share < 1 / BLOCK:
                raise DataError(
                    f"{key}.weight: {source.weight} is a fraction of {part.share:.1e} of all "
                    f"weights; at least 1 / {BLOCK:,} is needed"
                )
            parts.append(part)
            first, own = (each.data.manifest.tokenizer.fingerprint for each in (parts[0], part))
            if own != first:
                raise DataError(
                    f"{key}.path: {part.data.path} was made with tokenizer {own[:12]}, "
                    f"{parts[0].data.path} with {first[:12]}: their token ids mean different things"
                )
        return cls(parts, "data.mixture")

    @property
    def tokenizer(self) -> TokenizerInfo:
        """The tokenizer of all parts."""
        return self.parts[0].data.manifest.tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies what training sees: a folder's fingerprint, or that of a mixture."""
        prints = [part.data.manifest.fingerprint for part in self.parts]
        if len(prints) == 1:
            return prints[0]
        counts_P = shares_of_a_block([part.share for part in self.parts])
        lines = [f"{name}:{count}" for name, count in zip(prints, counts_P, strict=True)]
        return hashlib.sha256("\n".join(["mixture", *lines]).encode()).hexdigest()

    def samples(self, sequence_length: int, seed: int) -> "MixedSamples":
        """Returns the training samples in order.

        Args:
            sequence_length: Targets of a sample, T, in tokens.
            seed: Not negative; determines the order.

        Returns:
            Samples by their global number.

        Raises:
            DataError: A train split is shorter than one sample.
        """
        each = [
            TrainingSamples(part.data.split("train"), sequence_length, seed) for part in self.parts
        ]
        return MixedSamples(each, [part.share for part in self.parts], seed)

    def validation(self) -> list[Part]:
        """Lists the parts whose validation split is not empty.

        Returns:
            These, each with its weight in the mean loss as its share: together 1.
        """
        parts = [part for part in self.parts if part.data.split("validation").num_tokens]
        total = sum(part.share for part in parts)
        return [part._replace(share=part.share / total) for part in parts]

    def documents(self, samples: "MixedSamples", numbers: Sequence[int]) -> dict[str, list[int]]:
        """Finds the documents that contribute tokens to samples.

        Args:
            samples: The result of `samples`.
            numbers: The numbers of the samples.

        Returns:
            Document numbers in the train split, ascending, by the name of the part.
        """
        by_part: dict[str, set[int]] = {}
        for number in numbers:
            source, sample = samples.place(number)
            documents = samples.sources[source].documents(sample)
            by_part.setdefault(self.parts[source].name, set()).update(documents)
        return {name: sorted(documents) for name, documents in sorted(by_part.items())}


class MixedSamples(Dataset[torch.Tensor]):
    """Samples of one source or several by their global number, without end.

    The source of sample g, and its number k within that source, depend only on the seed, the shares
    and g. The order of sources repeats every `BLOCK` samples, which contain each source according
    to its share, evenly spaced from a random start, so that the first g samples hold each source's
    share within P + 1 samples.

    Args:
        sources: The samples of each of P sources.
        shares: The share of each; they sum to 1, none is below 1 / `BLOCK`.
        seed: Not negative.

    Attributes:
        sources: The samples of each source.
        samples_per_epoch: The total of all sources, whatever their shares.
    """

    def __init__(
        self, sources: Sequence[TrainingSamples], shares: Sequence[float], seed: int
    ) -> None:
        self.samples_per_epoch = sum(source.samples_per_epoch for source in sources)
        self.sources, self._shares, self._seed = sources, shares, seed

    def __getitem__(self, sample: int) -> torch.Tensor:
        """Reads a sample.

        Args:
            sample: Its global number, from 0.

        Returns:
            T + 1 token ids, int64, shape (T + 1,).
        """
        source, number = self.place(sample)
        return self.sources[source][number]

    def place(self, sample: int) -> tuple[int, int]:
        """Finds the source of a sample, and its number there.

        Args:
            sample: Its global number, from 0.

        Returns:
            The number of its source, and the sample's number in the source.
        """
        if sample < 0:
            raise IndexError(f"sample {sample}")
        block, position = divmod(sample, BLOCK)
        source_N, number_N, counts_P = self._block
        source = int(source_N[position])
        return source, block * int(counts_P[source]) + int(number_N[position])

    @functools.cached_property
    def _block(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Source and number within it of the N samples of a block; samples per source."""
        counts_P = shares_of_a_block(self._shares)
        generator = np.random.Generator(np.random.PCG64((self._seed, 0, _SOURCES)))
        phases_P = generator.random(len(counts_P))
        source_N = np.repeat(np.arange(len(counts_P), dtype=np.int32), counts_P)
        first_P = counts_P.cumsum() - counts_P
        number_N = np.arange(len(source_N), dtype=np.int32) - first_P.astype(np.int32)[source_N]
        times_N = (number_N + phases_P[source_N]) / counts_P[source_N]
        order_N = np.lexsort((source_N, times_N))  # by time, ties by source
        return source_N[order_N], number_N[order_N], counts_P

    def __getstate__(self) -> dict[str, Any]:
        # A worker process builds its own block: sending it would take longer.
        return {name: value for name, value in self.__dict__.items() if name != "_block"}


def shares_of_a_block(shares: Sequence[float]) -> npt.NDArray[np.int64]:
    """Divides a block among sources by the largest-remainder method.

    Args:
        shares: The share of each source, at least 1 / `BLOCK`; they sum to 1.

    Returns:
        Samples of each source, at least 1; they sum to `BLOCK`.
    """
    exact_P = np.asarray(shares, dtype=np.float64) * BLOCK
    counts_P = np.maximum(np.floor(exact_P).astype(np.int64), 1)
    missing = BLOCK - int(counts_P.sum())
    largest_first = np.argsort(counts_P - exact_P, kind="stable")
    counts_P[largest_first[:missing]] += 1
    return counts_P


def _open(path: str, key: str) -> PreparedData:
    with prefixed(key):
        return PreparedData.open(path)


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
