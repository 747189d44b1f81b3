"""The order of training samples of text: a function of the seed alone.

The samples of epoch e are the documents in a random order seeded by (seed, e), laid end to end and
cut, then shuffled themselves. Samples of all epochs are numbered on without end.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from data.errors import DataError
from data.text.dataset import TokenStream
from data.text.indexed import build_sample_index

# The last word of a random stream's seed: the two permutations of an epoch must not be one.
_DOCUMENTS, _SAMPLES = 0, 1
_EPOCHS_KEPT = 2  # a batch, and what workers fetch ahead, may straddle the end of an epoch


class _Epoch(NamedTuple):
    """One epoch of S samples over D documents."""

    document_order_D: npt.NDArray[np.int32]
    sample_starts_S2: npt.NDArray[np.int64 | np.int32]  # one row more than samples
    sample_order_S: npt.NDArray[np.int64]


class TrainingSamples(Dataset[torch.Tensor]):
    """Samples by their global number, without end: sample g is number g % n of epoch g // n.

    Args:
        stream: The tokens of a split.
        sequence_length: Targets of a sample, T, in tokens.
        seed: Not negative; another seed gives another order.

    Attributes:
        samples_per_epoch: n, the same in every epoch: (tokens - 1) // T.

    Raises:
        DataError: The split is shorter than one sample.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int) -> None:
        if sequence_length < 1:
            raise DataError(f"sequence_length {sequence_length}: at least 1")
        if seed < 0:
            raise DataError(f"seed {seed}: at least 0")
        if stream.num_tokens < sequence_length + 1:
            raise DataError(
                f"{stream.prefix}.bin: {stream.num_tokens:,} tokens, but one sample of sequence "
                f"length {sequence_length:,} needs {sequence_length + 1:,}; prepare more text or "
                "shorten the sequence"
            )
        self.samples_per_epoch = (stream.num_tokens - 1) // sequence_length
        self._stream = stream
        self._sequence_length = sequence_length
        self._seed = seed
        self._epochs: dict[int, _Epoch] = {}

    def __getitem__(self, sample: int) -> torch.Tensor:
        """Reads a sample.

        Args:
            sample: Its global number, from 0.

        Returns:
            T + 1 token ids, int64, shape (T + 1,): the inputs are all but the last, the targets
            all but the first.
        """
        if sample < 0:
            raise IndexError(f"sample {sample}")
        epoch, (first, offset), (last, end) = self._bounds(sample)
        parts = []
        for place in range(first, last + 1):
            length = end + 1 - offset if place == last else None
            document = int(epoch.document_order_D[place])
            parts.append(self._stream.read_document(document, offset, length))
            offset = 0
        return torch.from_numpy(np.concatenate(parts))

    def documents(self, sample: int) -> list[int]:
        """Says which documents a sample has tokens of.

        Args:
            sample: Its global number, from 0.

        Returns:
            Their numbers in the split, from 0, in the sample's order. The last one may have given
            only the last target.
        """
        epoch, (first, _), (last, _) = self._bounds(sample)
        return [int(document) for document in epoch.document_order_D[first : last + 1]]

    def _bounds(self, sample: int) -> tuple[_Epoch, list[int], list[int]]:
        """The sample's epoch; place in the order of documents, and offset, of its two ends."""
        number, position = divmod(sample, self.samples_per_epoch)
        epoch = self._epoch(number)
        row = epoch.sample_order_S[position]
        return epoch, epoch.sample_starts_S2[row].tolist(), epoch.sample_starts_S2[row + 1].tolist()

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            self._epochs[number] = self._build_epoch(number)
            for old in sorted(self._epochs)[:-_EPOCHS_KEPT]:
                if old != number:
                    del self._epochs[old]
        return self._epochs[number]

    def _build_epoch(self, number: int) -> _Epoch:
        lengths_D = self._stream.document_lengths
        documents = np.arange(len(lengths_D), dtype=np.int32)
        order_D = self._generator(number, _DOCUMENTS).permutation(documents)
        starts_S2 = build_sample_index(lengths_D, order_D, self._sequence_length)
        assert len(starts_S2) == self.samples_per_epoch + 1
        return _Epoch(
            order_D,
            starts_S2,
            self._generator(number, _SAMPLES).permutation(self.samples_per_epoch),
        )

    def _generator(self, epoch: int, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64((self._seed, epoch, purpose)))

    def __getstate__(self) -> dict[str, Any]:
        # A worker process builds its own epochs: sending them would take longer.
        return {**self.__dict__, "_epochs": {}}
