"""Prepares text: splits it by document, encodes it in parts, joins these, writes a manifest."""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError, user_path
from polyad.data.files import writing
from polyad.data.prepared import MANIFEST_FILE, SPLITS, SplitName, alone, in_words, staged_folder
from polyad.data.progress import Progress, Report
from polyad.data.text.indexed import token_dtype
from polyad.data.text.job import Asked
from polyad.data.text.manifest import (
    FORMAT_VERSION,
    Manifest,
    SplitInfo,
    TokenizerInfo,
    data_fingerprint,
)
from polyad.data.text.parts import (
    Finished,
    encode_part,
    finished_parts,
    join,
    missing_parts,
    read_part,
)
from polyad.data.text.plan import MOST_PARTS, Cut, Workplace
from polyad.data.text.processes import Work, encode_in_processes
from polyad.data.text.tokenizers.tokenizer import special_line
from polyad.data.text.verification import check_replaceable

TEXT_OF_A_PART = 128 << 20
"""Approximate text per part, in bytes: an interrupted call loses at most that much work."""


def prepare(
    source: str,
    tokenizer: str,
    output: str | Path,
    *,
    overwrite: bool = False,
    report: Report | None = None,
    **options: Any,
) -> Manifest:
    """Turns text into a folder that training reads.

    The text is streamed once, and once before that to train a tokenizer (on the documents of the
    train split only). The folder appears complete or not at all. If it exists and was prepared from
    the same request, it is kept and nothing is read. Large text is encoded in parts: after an
    interruption, the same request encodes only the unfinished parts.

    Args:
        source: See `Asked`.
        tokenizer: See `Asked`.
        output: The folder to make.
        overwrite: Whether prepared data in `output` may be replaced.
        report: Receives each line of progress; None writes to standard error.
        options: The other fields of `Asked`.

    Returns:
        The manifest of the folder.

    Raises:
        DataError: An argument, the text, the tokenizer or the output folder is invalid, or an
            argument has no effect for this text.
    """
    asked = Asked(source=source, tokenizer=tokenizer, **options)
    return Preparation(asked, output, overwrite=overwrite, report=report).all()


class Preparation:
    """Prepares a text: encodes parts, independently of each other, and joins them.

    The result does not depend on the number of parts. A finished part is kept, and skipped by the
    next call with the same request.

    Args:
        asked: What to prepare.
        output: The folder to make.
        parts: Number of parts, if several processes or machines make them; None: chosen by the size
            of the text.
        overwrite: Whether prepared data in `output`, and parts of another request, may be replaced.
        report: Receives each line of progress; None writes to standard error.

    Attributes:
        output: The folder to make.
        existing: Its manifest, if it was prepared from the same request.

    Raises:
        DataError: The request or the folder is invalid.
    """

    def __init__(
        self,
        asked: Asked,
        output: str | Path,
        parts: int | None = None,
        *,
        overwrite: bool = False,
        report: Report | None = None,
    ) -> None:
        self._asked, self._parts, self._overwrite = asked, parts, overwrite
        self.output = user_path(output).resolve()
        self._progress = Progress(report)
        self._job = asked.open()
        for note in self._job.notes:
            self._progress.say(note)
        self.existing = self._found_or_replaceable()
        if self.existing is not None:
            self._progress.say(
                f"{self.output}: already prepared from the same text and options; kept as it is"
            )
        if parts is not None and not 1 <= parts <= MOST_PARTS:
            raise DataError(f"--parts: {parts} is not allowed; 1 to {MOST_PARTS:,}")

    @functools.cached_property
    def _cut(self) -> Cut:
        sources = self._job.sources(self._progress)
        parts = self._parts or min(sources.parts_of(TEXT_OF_A_PART), MOST_PARTS)
        return Cut(self._job, sources, self.output, parts, asked=self._parts is not None)

    @property
    def folder(self) -> Path:
        """Where the parts are made."""
        return self._cut.folder

    def begin(self) -> list[int]:
        """Creates the folder of the parts with its plan, and trains the tokenizer if needed.

        Returns:
            The numbers of the missing parts.
        """
        with contextlib.closing(self._progress), writing(self.output):
            return missing_parts(self._open(train=True, overwrite=self._overwrite))

    def needs_training(self) -> bool:
        """Returns whether `begin` has to train a tokenizer."""
        return self._job.tokenizer is None and self._cut.find(overwrite=self._overwrite) is None

    def left(self) -> list[int]:
        """Lists the numbers of the missing parts, without changing anything."""
        found = self._cut.find(overwrite=self._overwrite)
        return list(range(self._cut.parts)) if found is None else missing_parts(found)

    def part(self, number: int) -> tuple[Finished, list[int]]:
        """Encodes one part.

        Args:
            number: The number of the part, from 0.

        Returns:
            The description of the part, and the numbers of the missing parts.

        Raises:
            DataError: There is no such part, the tokenizer is not trained yet, or the folder holds
                parts of another request.
        """
        if not 0 <= number < self._cut.parts:
            raise DataError(
                f"--part: {number} is not allowed; 0 to {self._cut.parts - 1} with --parts "
                f"{self._cut.parts}"
            )
        with contextlib.closing(self._progress), writing(self.output):
            work = self._open(train=False, overwrite=False)
            self._encode(work, [number], 1)
            done = read_part(work, number)
            assert done is not None
            return done, missing_parts(work)

    def join(self) -> Manifest:
        """Joins the parts.

        Returns:
            The manifest of the folder.

        Raises:
            DataError: A part is missing, belongs to another plan, or is damaged.
        """
        with contextlib.closing(self._progress), self._undisturbed():
            return self._join(self._open(train=False, overwrite=False))

    def all(self, processes: int = 1) -> Manifest:
        """Encodes the missing parts, and joins all.

        Args:
            processes: Number of parts that are encoded at the same time.

        Returns:
            The manifest of the folder.
        """
        if self.existing is not None:
            return self.existing
        with contextlib.closing(self._progress), self._undisturbed():
            return self.existing or self._made(processes)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Locks out other processes that join the same parts; waits for one that does."""
        with writing(self.output), contextlib.ExitStack() as stack:
            if not stack.enter_context(alone(self.folder)):
                self._progress.say(
                    f"{self.output}: waiting for another process that is preparing it"
                )
                stack.enter_context(alone(self.folder, wait=True))
                self.existing = self._found_or_replaceable()
            yield

    def _made(self, processes: int) -> Manifest:
        try:
            work = self._open(train=True, overwrite=self._overwrite)
            left, parts = missing_parts(work), work.plan.parts
            if len(left) < parts:
                there = parts - len(left)
                self._progress.say(f"{self.folder}: {there} of {parts} parts already exist")
            self._encode(work, left, processes)
            return self._join(work)
        except BaseException as error:
            # After an error in the text, its parts are useless; after a disk or network error a
            # later attempt may succeed.
            final = isinstance(error, DataError) and not isinstance(error.__cause__, OSError)
            if not self._cut.asked and (final or not self._cut.holds_work()):
                self._cut.remove()
            raise

    def _open(self, *, train: bool, overwrite: bool) -> Workplace:
        return self._cut.open(self._progress, train=train, overwrite=overwrite)

    def _encode(self, work: Workplace, numbers: list[int], processes: int) -> None:
        """Encodes parts, with one progress line for all of them."""
        if not numbers:
            return
        # The exact size of a part is known only once it is cut; an average is close enough.
        total_bytes = work.sources.total_bytes * len(numbers) // work.plan.parts
        self._progress.start("encoding", total_bytes)
        if processes > 1:
            files = Work(self._asked, str(self.output), work.plan.parts)
            total = encode_in_processes(files, numbers, processes, self._progress.update)
        else:
            total = [0, 0]
            for number in numbers:
                before = tuple(total)

                def update(read: int, tokens: int, before: tuple[int, ...] = before) -> None:
                    self._progress.update(before[0] + read, before[1] + tokens)

                done = encode_part(work, number, update)
                total[0] += done.bytes_read
                total[1] += done.tokens
        self._progress.finish(*total)

    def _join(self, work: Workplace) -> Manifest:
        parts = finished_parts(work)
        with staged_folder(self.output) as folder:
            work.tokenizer.save(folder / work.tokenizer.file_name)
            splits = join(work, parts, folder, self._progress)
            manifest = self._manifest(work, parts, splits).write(folder)
            self._found_or_replaceable()  # another call may have made something in the meantime
        self._cut.remove()
        self._tell(parts, manifest)
        return manifest

    def _manifest(
        self, work: Workplace, parts: Sequence[Finished], splits: dict[SplitName, SplitInfo]
    ) -> Manifest:
        for name, source in work.sources.by_split.items():
            if splits[name].documents == 0:
                raise DataError(f"{source.spec}: no text in it (for the {name} split)")
        tokenizer = work.tokenizer
        info = TokenizerInfo(
            fingerprint=tokenizer.fingerprint,
            file=tokenizer.file_name,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            end_of_text_id=tokenizer.end_of_text_id,
            begin_of_text=tokenizer.begin_of_text,
            begin_of_text_id=tokenizer.begin_of_text_id,
        )
        return Manifest(
            format_version=FORMAT_VERSION,
            request=self._job.request,
            tokenizer=info,
            splits=splits,
            dtype="uint16" if token_dtype(tokenizer.vocab_size)().itemsize == 2 else "int32",
            skipped_empty=sum(part.skipped_empty for part in parts),
            skipped_unreadable=sum(part.skipped_unreadable for part in parts),
            files=dict(self._job.files),
            left_out=dict(self._job.left_out),
            split_by=work.sources.split_by,
            fingerprint=data_fingerprint(splits, info),
        )

    def _found_or_replaceable(self) -> Manifest | None:
        """Reads the manifest of the output if it was prepared from the same request.

        Returns:
            The manifest; None if the output may be created or replaced.

        Raises:
            DataError: The output holds something that may not be replaced.
        """
        from polyad.data.text.dataset import PreparedData

        if (self.output / MANIFEST_FILE).is_file():
            # Damaged data is replaced with --overwrite, otherwise refused.
            with contextlib.suppress(DataError):
                manifest = PreparedData.open(self.output).manifest
                given = self._job.tokenizer
                # Older manifests lack the token that begins each document.
                begin = None if given is None else given.begin_of_text
                begins = manifest.tokenizer.begin_of_text == begin
                if manifest.request == self._job.request and begins:
                    return manifest
        check_replaceable(self.output, overwrite=self._overwrite)
        return None

    def _tell(self, parts: Sequence[Finished], manifest: Manifest) -> None:
        """Reports what the folder contains, what was left out, and where text was cut."""
        counted = {
            "documents were split, as one holds at most 2,147,483,647 tokens": sum(
                part.cut_documents for part in parts
            ),
            "cuts inside long documents, at line ends: tokens next to a cut may differ": sum(
                part.forced_cuts for part in parts
            ),
        }
        if self._cut.asked:
            what = (
                f"of {len(parts):,} parts are empty: documents and compressed files are not divided"
            )
            counted[what] = sum(not part.documents for part in parts)
        for what, count in counted.items():
            if count:
                self._progress.say(f"{count:,} {what}")
        special = sum((Counter(part.special) for part in parts), Counter[str]())
        if line := special_line(special):
            self._progress.say(line)
        request = manifest.request
        fractions = {"validation": request.validation_fraction, "test": request.test_fraction}
        for name in SPLITS:
            split = manifest.splits[name]
            self._progress.say(f"{name}: {split.documents:,} documents, {split.tokens:,} tokens")
            if fractions.get(name, 1) and split.documents == 0:
                self._progress.say(
                    f"warning: too few documents in {request.source} for a {name} split"
                )
        if left := left_out_of(manifest):
            self._progress.say(f"left out: {left}")
        self._progress.say(
            f"prepared {self.output} (vocabulary of {manifest.tokenizer.vocab_size:,}; "
            f"{manifest.tokenizer.in_words()})"
        )


def left_out_of(manifest: Manifest) -> str:
    """Describes what a folder leaves out, by reason and number; empty if nothing.

    Args:
        manifest: The manifest of the folder.
    """
    counted = {
        "documents without text": manifest.skipped_empty,
        "unreadable files": manifest.skipped_unreadable,
    }
    found = {reason: count for reason, count in counted.items() if count}
    return in_words(found | manifest.left_out)
