"""One part: encoded into a folder of its own, which appears complete or not at all.

It holds the tokens of the text that it has, by the split of its source: which split a document is
dealt to depends on how many there are before it, in all parts. A record of each document says what
the join needs to deal it out.
"""

import contextlib
from collections.abc import Callable

from pydantic import ValidationError

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.prepared import SPLITS, Count, Sha256, SplitName, seal, staged_folder, write_sealed
from polyad.data.text.parts.plan import Workplace
from polyad.data.text.parts.writer import RECORDS_SUFFIX, DatasetWriter, PartSplit
from polyad.data.text.source import Skipped
from polyad.data.text.split_files import RECORD, token_dtype
from polyad.data.text.tokenizers.tokenizer import all_cores

PART_FILE = "part.json"
Update = Callable[[int, int], None]
"""Receives the bytes of a part that are read, and its tokens."""


class Finished(Config):
    """A finished part: `part.json`, written last."""

    plan: Sha256
    """The digest of the plan that it is of."""
    part: Count
    """Its number."""
    bytes_read: Count
    """Bytes of the sources."""
    splits: dict[SplitName, PartSplit]
    """What it holds of each source, with digests of its files."""
    skipped_empty: Count
    skipped_unreadable: Count
    cut_documents: Count
    forced_cuts: Count
    sha256: Sha256 | None = None
    """SHA-256 of all other keys."""

    @property
    def tokens(self) -> int:
        """Tokens of all splits."""
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents(self) -> int:
        """Documents of all splits."""
        return sum(split.documents for split in self.splits.values())


def encode_part(work: Workplace, number: int, update: Update) -> Finished:
    """Encodes a part, unless it is there.

    Args:
        work: The folder of the parts.
        number: Which one.
        update: Called with what is read and written of it.

    Returns:
        What is in it.

    Raises:
        DataError: The part that is there is of something else or damaged, or the text is bad.
        OSError: It cannot be written.
    """
    if done := read_part(work, number):
        return done
    sources, skipped = work.sources.part(number, work.plan.parts), Skipped()
    with all_cores(), staged_folder(work.part_folder(number)) as folder:
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
        )
        return write_sealed(finished, folder / PART_FILE)


def read_part(work: Workplace, number: int) -> Finished | None:
    """Reads what a finished part says of itself, and checks the sizes of its files.

    Args:
        work: The folder of the parts.
        number: Which one.

    Returns:
        What is in it; None where it is not there.

    Raises:
        DataError: It is of another plan, or damaged.
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
            f"{folder}: was made from other text, tokenizer or options: it is {made}, and this is "
            f"part {number} of plan {work.plan.digest()[:12]}; delete it and give the same command "
            "again"
        )
    for name, size in expected_sizes(work, found).items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise work.damaged(file, f"does not have the {size:,} bytes that were written")
    return found


def expected_sizes(work: Workplace, part: Finished) -> dict[str, int]:
    """Sizes of the files of a part.

    Args:
        work: The folder of the parts.
        part: What it says of itself.

    Returns:
        Bytes, by name.
    """
    width = token_dtype(work.tokenizer.vocab_size)().itemsize
    sizes = {}
    for name, split in part.splits.items():
        sizes[f"{name}.bin"] = split.tokens * width
        sizes[f"{name}{RECORDS_SUFFIX}"] = split.documents * RECORD.itemsize
    return sizes


def finished_parts(work: Workplace) -> list[Finished]:
    """Reads what all parts say of themselves.

    Raises:
        DataError: One is missing, of something else, or damaged.
    """
    found = [read_part(work, number) for number in range(work.plan.parts)]
    if missing := [number for number, part in enumerate(found) if part is None]:
        many = "parts" if len(missing) > 1 else "part"
        raise DataError(
            f"{work.folder}: {many} {ranges(missing)} of {work.plan.parts} (from 0) missing; "
            f"encode each with --part, or all by the same command without --join"
        )
    return [part for part in found if part is not None]


def missing_parts(work: Workplace) -> list[int]:
    """Lists the numbers of the parts that are not there.

    Raises:
        DataError: One that is there is of something else, or damaged.
    """
    return [number for number in range(work.plan.parts) if read_part(work, number) is None]


def ranges(numbers: list[int]) -> str:
    """Writes numbers as Slurm does.

    Args:
        numbers: In order.

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
