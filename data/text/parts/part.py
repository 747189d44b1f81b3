"""One part: encoded into a folder of its own, which appears complete or not at all.

It holds the tokens of the text that it has, by the split of its source: which split a document is
dealt to depends on how many there are before it, in all parts. `.lengths` and `.counts` say of each
document what the join needs to deal it out.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.text.manifest import (
    LENGTHS_SUFFIX,
    SPLITS,
    Count,
    Sha256,
    SplitName,
    flush_to_disk,
    seal,
)
from polyad.data.text.parts.plan import Workplace
from polyad.data.text.prepare import encode
from polyad.data.text.resume import read_resume, remove_resume, save_resume
from polyad.data.text.split_writer import COUNTS, COUNTS_SUFFIX, SplitState, token_dtype
from polyad.data.text.staging import staged_folder
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.tokenizer import all_cores
from polyad.data.text.writer import DatasetWriter

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
    splits: dict[SplitName, SplitState]
    """What it holds of each source, with digests of its files."""
    skipped_empty: Count
    skipped_unreadable: Count
    cut_documents: Count
    forced_cuts: Count
    sha256: Sha256 | None = None
    """SHA-256 of all other keys."""


def encode_part(work: Workplace, number: int, update: Update) -> Finished:
    """Encodes a part, unless it is there.

    An interrupted call on the same host is gone on from.

    Args:
        work: The folder of the parts.
        number: Which one.
        update: Called with what is read and written of it.

    Returns:
        What is in it.

    Raises:
        DataError: The part that is there is of something else or damaged, or the text is bad.
    """
    if done := read_part(work, number):
        return done
    request, name = work.plan.request, f"{number} of {work.plan.parts}"
    sources = work.sources.part(number, work.plan.parts)
    output = work.part_folder(number)

    def goes_on(folder: Path) -> bool:
        return read_resume(folder, request, name) is not None

    with all_cores(), staged_folder(output, goes_on) as folder:
        resume = read_resume(folder, request, name)
        tokenizer = work.tokenizer
        if resume is not None:
            tokenizer = load_tokenizer(folder / resume.tokenizer_file, resume.end_of_text)
        else:
            tokenizer.save(folder / tokenizer.file_name)
        saved = (resume.splits, resume.held) if resume else (None, "")
        writer = DatasetWriter(folder, tokenizer, *saved, counted=True)

        def save(documents: int) -> None:
            states = writer.states()
            save_resume(folder, request, tokenizer, documents, states, writer.held, name)

        with contextlib.closing(writer):
            skipped = encode(sources, writer, resume, save, update)
            states = writer.states()
        finished = Finished(
            plan=work.plan.digest(),
            part=number,
            bytes_read=sources.total_bytes,
            splits=states,
            skipped_empty=skipped.empty,
            skipped_unreadable=skipped.unreadable,
            cut_documents=writer.cut_documents,
            forced_cuts=writer.forced_cuts,
        )
        (folder / tokenizer.file_name).unlink()
        remove_resume(folder, lengths=False)
        sealed = finished.model_copy(update={"sha256": seal(finished.model_dump(mode="json"))})
        path = folder / PART_FILE
        path.write_text(sealed.model_dump_json(indent=2) + "\n", encoding="utf-8")
        flush_to_disk(path)
    return sealed


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
        raise damaged(path, "is not readable") from None
    if found.sha256 != seal(found.model_dump(mode="json")) or set(found.splits) != set(SPLITS):
        raise damaged(path, "is not what was written")
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
            raise damaged(file, f"does not have the {size:,} bytes that were written")
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
    for name, state in part.splits.items():
        sizes[f"{name}.bin"] = state.tokens * width
        sizes[f"{name}{LENGTHS_SUFFIX}"] = state.documents * 4
        sizes[f"{name}{COUNTS_SUFFIX}"] = state.documents * COUNTS.itemsize
    return sizes


def damaged(file: Path, how: str) -> DataError:
    """The error of a file of a part.

    Args:
        file: The file.
        how: What is wrong with it.
    """
    return DataError(
        f"{file}: damaged: it {how}; delete {file.parent.name} there, and give the same command "
        "again"
    )


def missing_parts(work: Workplace) -> list[int]:
    """Lists the parts that are not there.

    Args:
        work: The folder of the parts.

    Returns:
        Their numbers.

    Raises:
        DataError: One is of something else, or damaged.
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
