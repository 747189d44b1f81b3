"""The order of training samples of text: a function of the seed alone.

The samples of epoch e are the documents in a random order seeded by (seed, e), laid end to end and
cut, then shuffled themselves. Samples of all epochs are numbered on without end.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from polyad.data.errors import DataError
from polyad.data.order import Arrays, EpochOrders
from polyad.data.text.dataset import TokenStream
from polyad.data.text.indexed import build_sample_index

# The last word of a random stream's seed: the two permutations of an epoch must not be one.
_DOCUMENTS, _SAMPLES = 0, 1
MOST_DOCUMENTS = 2**31 - 1
"""An order holds numbers of documents in 32 bits."""


class TrainingSamples(Dataset[torch.Tensor]):
    """Samples by their global number, without end: sample g is number g % n of epoch g // n.

    Args:
        stream: The tokens of a split.
        sequence_length: Targets of a sample, T, in tokens.
        seed: Not negative; another seed gives another order.

    Attributes:
        samples_per_epoch: n, the same in every epoch: (tokens - 1) // T.

    Raises:
        DataError: The split is shorter than one sample, or has too many documents.
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
        if stream.num_documents > MOST_DOCUMENTS:
            raise DataError(
                f"{stream.prefix}.idx: {stream.num_documents:,} documents, but the order of an "
                f"epoch has room for {MOST_DOCUMENTS:,}; prepare the text as several folders and "
                "name them in data.mixture"
            )
        self.samples_per_epoch = (stream.num_tokens - 1) // sequence_length
        self._stream = stream
        self._sequence_length = sequence_length
        self._seed = seed
        self._orders = EpochOrders(
            self._build_epoch,
            self.samples_per_epoch,
            ("text", stream.identity, sequence_length, seed),
        )

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
        documents, (first, offset), (last, end) = self._bounds(sample)
        parts = []
        for place in range(first, last + 1):
            length = end + 1 - offset if place == last else None
            document = int(documents[place])
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
        documents, (first, _), (last, _) = self._bounds(sample)
        return [int(document) for document in documents[first : last + 1]]

    def _bounds(self, sample: int) -> tuple[npt.NDArray[np.integer], list[int], list[int]]:
        """The order of documents; of a sample's two ends the place in it, and the offset."""
        epoch, position = self._orders(sample)
        row = epoch["samples"][position]
        starts_S2 = epoch["starts"]
        return epoch["documents"], starts_S2[row].tolist(), starts_S2[row + 1].tolist()

    def _build_epoch(self, number: int) -> Arrays:
        """The order of D documents, where each of S samples starts, and the order of samples."""
        lengths_D = self._stream.document_lengths
        documents = np.arange(len(lengths_D), dtype=np.int32)
        order_D = self._generator(number, _DOCUMENTS).permutation(documents)
        starts_S2 = build_sample_index(lengths_D, order_D, self._sequence_length)
        assert len(starts_S2) == self.samples_per_epoch + 1  # one row more than samples
        order_S = self._generator(number, _SAMPLES).permutation(self.samples_per_epoch)
        return {"documents": order_D, "starts": starts_S2, "samples": order_S}

    def _generator(self, epoch: int, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64((self._seed, epoch, purpose)))
