"""Joins parts: bytes are copied, each document to the split that it is dealt to."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError
from polyad.data.prepared import SPLITS, SplitName
from polyad.data.progress import Progress
from polyad.data.text.manifest import SplitInfo
from polyad.data.text.parts.part import Finished, expected_sizes
from polyad.data.text.parts.plan import Workplace
from polyad.data.text.parts.writer import RECORDS_SUFFIX, PartSplit
from polyad.data.text.split_files import RECORD, SplitWriter
from polyad.data.text.splits import split_of_documents

BLOCK_BYTES = 4 << 20
"""Read at once."""
BLOCK_DOCUMENTS = 1 << 16
"""Documents dealt out at once."""


def join(
    work: Workplace, parts: Sequence[Finished], folder: Path, progress: Progress
) -> dict[SplitName, SplitInfo]:
    """Writes the files of all splits from the parts.

    Memory does not grow with the text. Every byte of the parts is compared with their digests.

    Args:
        work: The folder of the parts.
        parts: All of them, in order.
        folder: Where the files go.
        progress: Of the copying; it says how fast that was where there are several parts.

    Returns:
        What each split holds.

    Raises:
        DataError: A part is damaged.
    """
    with contextlib.ExitStack() as stack:
        joint = _Joint(work, folder, progress)
        for writer in joint.writers.values():
            stack.enter_context(contextlib.closing(writer))
        progress.start("joining", sum(_bytes(work, part) for part in parts))
        for part in parts:
            joint.add(part)
        splits = {name: writer.finish() for name, writer in joint.writers.items()}
        if len(parts) > 1:
            progress.finish(joint.done)
    return splits


def _bytes(work: Workplace, part: Finished) -> int:
    return sum(expected_sizes(work, part).values())


class _Joint:
    """The folder that the parts are copied into, in order."""

    def __init__(self, work: Workplace, folder: Path, progress: Progress) -> None:
        self._work, self._progress = work, progress
        self.writers = {name: SplitWriter(folder / name, work.tokenizer) for name in SPLITS}
        self.done = 0
        by_documents = work.sources.split_by == "documents"
        dealt = split_of_documents("train", work.sources.fractions if by_documents else {})
        self._dealt: dict[SplitName, Iterator[SplitName]] = {
            name: dealt if name == "train" else repeat(name) for name in SPLITS
        }
        self._split: SplitName | None = None

    def add(self, part: Finished) -> None:
        for name in SPLITS:
            self._copy(name, self._work.part_folder(part.part) / name, part.splits[name])
        self.done += _bytes(self._work, part)

    def _copy(self, name: SplitName, prefix: Path, split: PartSplit) -> None:
        """Copies what a part has of a source."""
        width = self.writers[name].dtype.itemsize
        records_path = prefix.with_suffix(RECORDS_SUFFIX)
        with (
            _CheckedFile(self._work, prefix.with_suffix(".bin"), split.sha256) as tokens,
            _CheckedFile(self._work, records_path, split.records_sha256) as records,
        ):
            copied = 0
            for start in range(0, split.documents, BLOCK_DOCUMENTS):
                count = min(BLOCK_DOCUMENTS, split.documents - start)
                records_D = np.frombuffer(records.take_all(count * RECORD.itemsize), dtype=RECORD)
                left = split.tokens * width - copied
                if int(records_D["tokens"].sum(dtype=np.int64)) * width > left:
                    raise self._work.damaged(records_path, "is not what was written")
                for to, first, last in self._runs(name, records_D["goes_on"]):
                    run_D = records_D[first:last]
                    size = int(run_D["tokens"].sum(dtype=np.int64)) * width
                    self.writers[to].copy(tokens.take(size), run_D)
                    copied += size
                self._progress.update(self.done + copied)

    def _runs(
        self, name: SplitName, goes_on_D: npt.NDArray[np.bool_]
    ) -> Iterator[tuple[SplitName, int, int]]:
        """Deals documents out: a split, and the first and one behind the last that it gets."""
        first, run = 0, self._split
        for number, goes_on in enumerate(goes_on_D.tolist()):
            split = self._split or next(self._dealt[name])
            self._split = split if goes_on else None
            if split != run:
                if run is not None and number > first:
                    yield run, first, number
                first, run = number, split
        if run is not None and len(goes_on_D) > first:
            yield run, first, len(goes_on_D)


class _CheckedFile:
    """A file that is read in order and has to be what was written, to its end.

    A thread digests a block while the one before is copied.
    """

    def __init__(self, work: Workplace, path: Path, sha256: str) -> None:
        self._work, self._path, self._sha256 = work, path, sha256
        self._digest = hashlib.sha256()
        self._block = memoryview(b"")
        self._digested: Future[Any] | None = None

    def __enter__(self) -> "_CheckedFile":
        self._file = self._path.open("rb", buffering=0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digest")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                if self._block or self._next_block():
                    raise self._damaged("is longer than it was")
                self._thread.shutdown()
                if self._digest.hexdigest() != self._sha256:
                    raise self._damaged("has not the SHA-256 of what was written")
        finally:
            self._thread.shutdown()
            self._file.close()

    def take(self, count: int) -> Iterator[memoryview]:
        """Reads so many bytes, in blocks."""
        while count:
            if not self._block and not self._next_block():
                raise self._damaged("is shorter than it was")
            part, self._block = self._block[:count], self._block[count:]
            count -= len(part)
            yield part

    def take_all(self, count: int) -> bytes:
        """Reads so many bytes, together."""
        return b"".join(self.take(count))

    def _damaged(self, how: str) -> DataError:
        return self._work.damaged(self._path, how)

    def _next_block(self) -> bool:
        if self._digested is not None:
            self._digested.result()  # memory holds two blocks
        block = self._file.read(BLOCK_BYTES)
        if block:
            self._digested = self._thread.submit(self._digest.update, block)
        self._block = memoryview(block)
        return bool(block)
