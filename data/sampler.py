"""The order of training samples: a function of the seed and the step, and of nothing else.

Not of the number of processes, of steps, or of loader workers. The samples of epoch e are the
documents in a random order seeded by (seed, e), laid end to end and cut, then shuffled themselves.
Samples of all epochs are numbered on without end; step s of a run takes the next global batch.
"""

import contextlib
import itertools
import multiprocessing.resource_tracker
import signal
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from data.batches import batches_from
from data.errors import DataError
from data.text.dataset import TokenStream
from data.text.indexed import build_sample_index

# The last word of a random stream's seed: the two permutations of an epoch must not be one.
_DOCUMENTS, _SAMPLES = 0, 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
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


class _MicroBatches(Sampler[list[int]]):
    """The sample numbers of one rank's micro-batches, in order."""

    def __init__(
        self,
        steps: range,
        left_out: Collection[int],
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        ranks: int,
    ) -> None:
        self._steps, self._left_out = steps, left_out
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._stride = micro_batch_size * ranks
        self._offset = micro_batch_size * rank

    def __iter__(self) -> Iterator[list[int]]:
        batches = batches_from(self._steps.start, self._left_out)
        for batch in itertools.islice(batches, len(self._steps)):
            begin = batch * self._global_batch_size
            for start in range(begin, begin + self._global_batch_size, self._stride):
                first = start + self._offset
                yield list(range(first, first + self._micro_batch_size))

    def __len__(self) -> int:
        return len(self._steps) * (self._global_batch_size // self._stride)


def micro_batches(
    samples: Dataset[torch.Tensor],
    *,
    start_step: int,
    num_steps: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
    left_out: Collection[int] = (),
) -> Iterator[torch.Tensor]:
    """Reads what one data-parallel rank trains on.

    The global batch of step s is samples s * B to (s + 1) * B - 1 (see `data.batches` where some
    are left out), cut into B / m micro-batches; micro-batch j belongs to rank j % D. Whatever D is,
    the global batch is the same.

    Args:
        samples: The samples.
        start_step: First step, from 0: a resumed run begins where it was.
        num_steps: Steps to read.
        global_batch_size: B, samples of a step over all ranks.
        micro_batch_size: m, samples of one forward pass of one rank.
        data_parallel_rank: This rank, from 0.
        data_parallel_size: D, number of such ranks.
        num_workers: Loader processes; 0 reads in this one.
        pin_memory: Whether to put batches into page-locked memory, for a GPU.
        left_out: Global batches that no step takes.

    Returns:
        Iterator over num_steps * B / (m * D) tensors of token ids, int64, shape (m, T + 1).

    Raises:
        DataError: The sizes do not divide, or a number is out of its range.
    """
    _check_sizes(global_batch_size, micro_batch_size, data_parallel_rank, data_parallel_size)
    for name, value in (
        ("start_step", start_step),
        ("num_steps", num_steps),
        ("num_workers", num_workers),
    ):
        if value < 0:
            raise DataError(f"{name} {value}: at least 0")
    loader = DataLoader(
        samples,
        batch_sampler=_MicroBatches(
            range(start_step, start_step + num_steps),
            left_out,
            global_batch_size,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        ),
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals if num_workers else None,
        # A forked worker would hold this process's sockets to its peers open, so that they could
        # not see it die; a spawned one starts clean.
        multiprocessing_context="spawn" if num_workers else None,
        # Without a generator of its own the loader draws from, and so disturbs, torch's global one.
        generator=torch.Generator().manual_seed(0),
    )
    with _signals_blocked() if num_workers else contextlib.nullcontext():
        return iter(loader)


def _check_sizes(global_batch: int, micro_batch: int, rank: int, ranks: int) -> None:
    for name, value in (
        ("global_batch_size", global_batch),
        ("micro_batch_size", micro_batch),
        ("data_parallel_size", ranks),
    ):
        if value < 1:
            raise DataError(f"{name} {value}: at least 1")
    if not 0 <= rank < ranks:
        raise DataError(f"data_parallel_rank {rank}: at least 0 and below {ranks}")
    unit = micro_batch * ranks
    if global_batch % unit:
        below = global_batch // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        raise DataError(
            f"global_batch_size {global_batch}: not a multiple of micro_batch_size {micro_batch} x "
            f"data_parallel_size {ranks} = {unit}; {near} is"
        )


def _ignore_signals(worker: int) -> None:
    # A launcher signals every process of the job. The training process then saves a checkpoint
    # and needs its workers for that long; they end when it does.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks signals while workers start, which inherit that: they take seconds to ignore them."""
    blocked = set(_STOP_SIGNALS)
    # The tracker of multiprocessing starts with the first worker, and unblocks two when it has.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
