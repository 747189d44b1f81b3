"""Joins parts: bytes are copied, each document to the split that it is dealt to."""

import contextlib
import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError
from polyad.data.progress import Progress
from polyad.data.text.manifest import LENGTHS_SUFFIX, SPLITS, Manifest, SplitName
from polyad.data.text.parts.part import Finished, damaged, expected_sizes, ranges, read_part
from polyad.data.text.parts.plan import Workplace
from polyad.data.text.prepare import check_still_replaceable, seal_folder, summarize, tell_cuts
from polyad.data.text.source import Skipped
from polyad.data.text.split_writer import COUNTS, COUNTS_SUFFIX, SplitState, SplitWriter
from polyad.data.text.splits import split_of_documents
from polyad.data.text.staging import staged_folder

BLOCK_BYTES = 4 << 20
"""Read at once."""
BLOCK_DOCUMENTS = 1 << 16
"""Documents dealt out at once."""


def join(work: Workplace, output: Path, progress: Progress, *, overwrite: bool) -> Manifest:
    """Makes the folder from its parts, which are removed then.

    Memory does not grow with the text. Every byte of the parts is compared with their digests
    before the folder appears.

    Args:
        work: The folder of the parts.
        output: The folder to make.
        progress: Of the copying.
        overwrite: Whether prepared data in `output` may be replaced.

    Returns:
        The manifest of the folder: that of text which is prepared in one.

    Raises:
        DataError: A part is missing, of something else or damaged.
    """
    found = [read_part(work, number) for number in range(work.plan.parts)]
    parts = [part for part in found if part is not None]
    if lacking := [number for number, part in enumerate(found) if part is None]:
        many = "parts" if len(lacking) > 1 else "part"
        raise DataError(
            f"{work.name}: {many} {ranges(lacking)} of {work.plan.parts} (from 0) missing; encode "
            f"each with --part, or all by the same command without --join"
        )
    with contextlib.ExitStack() as stack, staged_folder(output, lambda folder: False) as folder:
        work.tokenizer.save(folder / work.tokenizer.file_name)
        joint = _Joint(work, folder, progress)
        for writer in joint.writers.values():
            stack.enter_context(contextlib.closing(writer))
        progress.start("joining", sum(_bytes(work, part) for part in parts))
        for part in parts:
            joint.add(part)
        splits = {name: writer.finish() for name, writer in joint.writers.items()}
        progress.finish(joint.done)
        skipped = Skipped(
            sum(part.skipped_empty for part in parts),
            sum(part.skipped_unreadable for part in parts),
        )
        sources, request = work.sources, work.plan.request
        manifest = seal_folder(sources, work.tokenizer, work.job, folder, splits, skipped)
        check_still_replaceable(request, output, overwrite=overwrite)
    work.remove()
    tell_cuts(
        sum(part.cut_documents for part in parts),
        sum(part.forced_cuts for part in parts),
        progress,
    )
    if without := sum(not any(s.documents for s in part.splits.values()) for part in parts):
        progress.say(
            f"{without:,} of {len(parts):,} parts had no text: no document is cut, and no "
            "compressed file"
        )
    summarize(manifest, output, progress)
    return manifest


def _bytes(work: Workplace, part: Finished) -> int:
    return sum(expected_sizes(work, part).values())


class _Joint:
    """The folder that the parts are copied into, in order."""

    def __init__(self, work: Workplace, folder: Path, progress: Progress) -> None:
        self._work, self._progress = work, progress
        self.writers = {name: SplitWriter(folder / name, work.tokenizer) for name in SPLITS}
        self.done = 0
        by_documents = work.sources.split_by == "documents"
        dealt = split_of_documents("train", work.job.fractions if by_documents else {})
        self._dealt: dict[SplitName, Iterator[SplitName]] = {
            name: dealt if name == "train" else repeat(name) for name in SPLITS
        }
        self._split: SplitName | None = None

    def add(self, part: Finished) -> None:
        for name in SPLITS:
            self._copy(name, self._work.part_folder(part.part) / name, part.splits[name])
        self.done += _bytes(self._work, part)

    def _copy(self, name: SplitName, prefix: Path, state: SplitState) -> None:
        """Copies what a part has of a source."""
        width = self.writers[name].dtype.itemsize
        with (
            _CheckedFile(prefix.with_suffix(".bin"), state.sha256) as tokens,
            _CheckedFile(prefix.with_suffix(LENGTHS_SUFFIX), state.lengths_sha256) as lengths,
            _CheckedFile(prefix.with_suffix(COUNTS_SUFFIX), state.counts_sha256) as counts,
        ):
            copied = 0
            for start in range(0, state.documents, BLOCK_DOCUMENTS):
                count = min(BLOCK_DOCUMENTS, state.documents - start)
                lengths_D = np.frombuffer(lengths.take_all(count * 4), dtype=np.int32)
                counts_D = np.frombuffer(counts.take_all(count * COUNTS.itemsize), dtype=COUNTS)
                if int(lengths_D.sum(dtype=np.int64)) * width > state.tokens * width - copied:
                    raise damaged(prefix.with_suffix(LENGTHS_SUFFIX), "is not what was written")
                for split, first, last in self._runs(name, counts_D["goes_on"]):
                    run_D, sums = lengths_D[first:last], counts_D[first:last]
                    size = int(run_D.sum(dtype=np.int64)) * width
                    self.writers[split].copy(
                        tokens.take(size), run_D, int(sums["words"].sum()), int(sums["bytes"].sum())
                    )
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

    def __init__(self, path: Path, sha256: str | None) -> None:
        self._path, self._sha256 = path, sha256
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
                    raise damaged(self._path, "is longer than it was")
                self._thread.shutdown()
                if self._digest.hexdigest() != self._sha256:
                    raise damaged(self._path, "has not the SHA-256 of what was written")
        finally:
            self._thread.shutdown()
            self._file.close()

    def take(self, count: int) -> Iterator[memoryview]:
        """Reads so many bytes, in blocks."""
        while count:
            if not self._block and not self._next_block():
                raise damaged(self._path, "is shorter than it was")
            part, self._block = self._block[:count], self._block[count:]
            count -= len(part)
            yield part

    def take_all(self, count: int) -> bytes:
        """Reads so many bytes, together."""
        return b"".join(self.take(count))

    def _next_block(self) -> bool:
        if self._digested is not None:
            self._digested.result()  # memory holds two blocks
        block = self._file.read(BLOCK_BYTES)
        if block:
            self._digested = self._thread.submit(self._digest.update, block)
        self._block = memoryview(block)
        return bool(block)
