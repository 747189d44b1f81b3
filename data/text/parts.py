"""Parts of a text: each is encoded into its own folder, and all are joined into one.

The folder of a part appears complete or not at all. It holds the part's tokens by the split of
their source: the split to which a document is assigned depends on the number of documents before
it, in all parts. A record of each document has what the join needs to assign it.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.prepared import SPLITS, Count, Sha256, SplitName, seal, staged_folder, write_sealed
from polyad.data.progress import Progress
from polyad.data.text.indexed import RECORD, SplitWriter, token_dtype
from polyad.data.text.manifest import SplitInfo
from polyad.data.text.plan import Workplace
from polyad.data.text.source import Skipped, split_of_documents
from polyad.data.text.tokenizers.tokenizer import all_cores
from polyad.data.text.writer import RECORDS_SUFFIX, DatasetWriter, PartSplit

PART_FILE = "part.json"
Update = Callable[[int, int], None]
"""Receives the number of bytes read of a part, and its number of tokens."""


class Finished(Config):
    """The description of a finished part: `part.json`, written last."""

    plan: Sha256
    """Digest of the plan that the part belongs to."""
    part: Count
    """Its number."""
    bytes_read: Count
    """Bytes read of the sources."""
    splits: dict[SplitName, PartSplit]
    """Its share of each source, with digests of its files."""
    skipped_empty: Count
    skipped_unreadable: Count
    cut_documents: Count
    forced_cuts: Count
    special: dict[str, Count] = Field(default_factory=dict)
    """Special tokens in the text that were encoded as ordinary characters, and how many."""
    sha256: Sha256 | None = None
    """SHA-256 of all other keys."""

    @property
    def tokens(self) -> int:
        """Total number of tokens in all splits."""
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents(self) -> int:
        """Total number of documents in all splits."""
        return sum(split.documents for split in self.splits.values())


def encode_part(work: Workplace, number: int, update: Update) -> Finished:
    """Encodes a part, unless it exists.

    Args:
        work: The folder of the parts.
        number: The number of the part.
        update: Called with the bytes read and the tokens written.

    Returns:
        The description of the part.

    Raises:
        DataError: The existing part belongs to another plan or is damaged, or the text is invalid.
        OSError: It cannot be written.
    """
    if done := read_part(work, number):
        return done
    sources, skipped = work.sources.part(number, work.plan.parts), Skipped()
    # A single part is joined at once, and would be encoded again if damaged.
    flush = work.asked or work.plan.parts > 1
    with all_cores(), staged_folder(work.part_folder(number), flush=flush) as folder:
        with contextlib.closing(DatasetWriter(folder, work.tokenizer)) as writer:
            for split, document in sources.assigned(skipped):
                writer.add(split, document.text, document.name, document.is_last)
                update(document.bytes_read, writer.tokens)
            splits = writer.finish()
        finished = Finished(
            plan=work.plan.digest(),
            part=number,
            bytes_read=sources.total_bytes,
            splits=splits,
            skipped_empty=skipped.empty,
            skipped_unreadable=skipped.unreadable,
            cut_documents=writer.cut_documents,
            forced_cuts=writer.forced_cuts,
            special=dict(writer.special),
        )
        return write_sealed(finished, folder / PART_FILE)


def read_part(work: Workplace, number: int) -> Finished | None:
    """Reads the description of a finished part, and checks the sizes of its files.

    Args:
        work: The folder of the parts.
        number: The number of the part.

    Returns:
        The description; None if the part does not exist.

    Raises:
        DataError: It belongs to another plan, or is damaged.
    """
    folder = work.part_folder(number)
    if not folder.exists():
        return None
    path = folder / PART_FILE
    try:
        found = Finished.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError):
        raise work.damaged(path, "is not readable") from None
    if found.sha256 != seal(found.model_dump(mode="json")) or set(found.splits) != set(SPLITS):
        raise work.damaged(path, "is not what was written")
    if (found.plan, found.part) != (work.plan.digest(), number):
        made = f"part {found.part} of plan {found.plan[:12]}"
        raise DataError(
            f"{folder}: was made from other text, tokenizer or options: it is {made}, but this is "
            f"part {number} of plan {work.plan.digest()[:12]}; delete it and run the same command "
            "again"
        )
    for name, size in expected_sizes(work, found).items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise work.damaged(file, f"does not have the {size:,} bytes that were written")
    return found


def expected_sizes(work: Workplace, part: Finished) -> dict[str, int]:
    """Computes the sizes of the files of a part.

    Returns:
        Sizes in bytes, by name.
    """
    width = token_dtype(work.tokenizer.vocab_size)().itemsize
    sizes = {}
    for name, split in part.splits.items():
        sizes[f"{name}.bin"] = split.tokens * width
        sizes[f"{name}{RECORDS_SUFFIX}"] = split.documents * RECORD.itemsize
    return sizes


def finished_parts(work: Workplace) -> list[Finished]:
    """Reads the descriptions of all parts.

    Raises:
        DataError: A part is missing, belongs to another plan, or is damaged.
    """
    found = [read_part(work, number) for number in range(work.plan.parts)]
    if missing := [number for number, part in enumerate(found) if part is None]:
        many = "parts" if len(missing) > 1 else "part"
        raise DataError(
            f"{work.folder}: {many} {ranges(missing)} of {work.plan.parts} (from 0) missing; "
            "prepare each with --part, or all with the same command without --join"
        )
    return [part for part in found if part is not None]


def missing_parts(work: Workplace) -> list[int]:
    """Lists the numbers of the missing parts.

    Raises:
        DataError: An existing part belongs to another plan, or is damaged.
    """
    return [number for number in range(work.plan.parts) if read_part(work, number) is None]


def ranges(numbers: list[int]) -> str:
    """Formats numbers as Slurm does.

    Args:
        numbers: Numbers in ascending order.

    Returns:
        For example `0,3-5`.
    """
    text, start = [], 0
    for place in range(len(numbers)):
        if place + 1 < len(numbers) and numbers[place + 1] == numbers[place] + 1:
            continue
        first, last = numbers[start], numbers[place]
        text.append(f"{first}" if first == last else f"{first}-{last}")
        start = place + 1
    return ",".join(text)


BLOCK_BYTES = 4 << 20
"""Bytes read at a time."""
BLOCK_DOCUMENTS = 1 << 16
"""Documents assigned at a time."""


def join(
    work: Workplace, parts: Sequence[Finished], folder: Path, progress: Progress
) -> dict[SplitName, SplitInfo]:
    """Writes the files of all splits from the parts.

    Memory use does not grow with the text. Every byte of the parts is compared with their digests.

    Args:
        work: The folder of the parts.
        parts: All of them, in order.
        folder: The folder to write to.
        progress: Reports the copy rate if there are several parts.

    Returns:
        The counts and digests of each split.

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
    """Writes the folder that the parts are copied into, in order."""

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
        """Copies a part's share of a source."""
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
        """Assigns runs of documents: yields a split, a first document, and one past the last."""
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
    """A file that is read in order, and whose content is compared with its digest at the end.

    A thread digests each block while the previous one is copied.
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
                    raise self._damaged("does not have the SHA-256 of what was written")
        finally:
            self._thread.shutdown()
            self._file.close()

    def take(self, count: int) -> Iterator[memoryview]:
        """Reads `count` bytes, in blocks."""
        while count:
            if not self._block and not self._next_block():
                raise self._damaged("is shorter than it was")
            part, self._block = self._block[:count], self._block[count:]
            count -= len(part)
            yield part

    def take_all(self, count: int) -> bytes:
        """Reads `count` bytes as one object."""
        return b"".join(self.take(count))

    def _damaged(self, how: str) -> DataError:
        return self._work.damaged(self._path, how)

    def _next_block(self) -> bool:
        if self._digested is not None:
            self._digested.result()  # so that memory holds at most two blocks
        block = self._file.read(BLOCK_BYTES)
        if block:
            self._digested = self._thread.submit(self._digest.update, block)
        self._block = memoryview(block)
        return bool(block)
