"""The whole of `polyad prepare --parts`, and its steps one by one, for a scheduler."""

import contextlib
from pathlib import Path

from polyad.data.errors import DataError, user_path
from polyad.data.progress import Progress, Report
from polyad.data.text.job import Asked
from polyad.data.text.manifest import Manifest
from polyad.data.text.parts.join import join
from polyad.data.text.parts.part import Finished, encode_part, missing_parts, read_part
from polyad.data.text.parts.plan import Cut, Workplace
from polyad.data.text.parts.processes import Work, encode_in_processes
from polyad.data.text.prepare import begin


class InParts:
    """A text that is prepared in parts.

    What is made does not depend on how many they are: all files are those of `prepare`.

    Args:
        asked: What to prepare.
        output: The folder to make.
        parts: How many.
        overwrite: Whether prepared data in `output`, and parts of another request, may be replaced.
        report: Receives each line of progress; None writes them to standard error.

    Attributes:
        output: The folder to make.
        existing: Its manifest, if it was prepared from the same request.
        folder: Where the parts are made.

    Raises:
        DataError: The request or the folder will not do.
    """

    def __init__(
        self,
        asked: Asked,
        output: str | Path,
        parts: int,
        *,
        overwrite: bool = False,
        report: Report | None = None,
    ) -> None:
        self._asked, self._parts, self._overwrite = asked, parts, overwrite
        self.output = user_path(output).resolve()
        self._progress = Progress(report)
        self._job = asked.open()
        self.existing = begin(self._job, self.output, self._progress, overwrite=overwrite)
        sources = self._job.sources(self._progress)
        self._cut = Cut(self._job, sources, self.output, parts)
        self.folder = self._cut.folder

    def begin(self) -> list[int]:
        """Makes the folder of the parts with its plan, and trains the tokenizer if need be.

        Returns:
            The numbers of the parts that are not there.
        """
        with contextlib.closing(self._progress):
            return missing_parts(self._open(train=True, overwrite=self._overwrite))

    def needs_training(self) -> bool:
        """Whether `begin` has a tokenizer to train."""
        return self._job.tokenizer is None and self._found() is None

    def left(self) -> list[int]:
        """Lists the parts that are not there, and changes nothing.

        Returns:
            Their numbers.
        """
        found = self._found()
        return list(range(self._parts)) if found is None else missing_parts(found)

    def part(self, number: int) -> tuple[Finished, list[int]]:
        """Encodes one part.

        Args:
            number: Which one, from 0.

        Returns:
            What is in it, and the numbers of the parts that are not there.

        Raises:
            DataError: There is no such part, the tokenizer is not trained yet, or the folder holds
                parts of another request.
        """
        if not 0 <= number < self._parts:
            raise DataError(
                f"--part: {number} is not allowed; 0 to {self._parts - 1} with --parts "
                f"{self._parts}"
            )
        with contextlib.closing(self._progress):
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
            DataError: A part is missing, of something else or damaged.
        """
        with contextlib.closing(self._progress):
            work = self._open(train=False, overwrite=False)
            return join(work, self.output, self._progress, overwrite=self._overwrite)

    def all(self, processes: int = 1) -> Manifest:
        """Encodes the parts that are not there, and joins all.

        Args:
            processes: How many parts are encoded at one time.

        Returns:
            The manifest of the folder.
        """
        with contextlib.closing(self._progress):
            work = self._open(train=True, overwrite=self._overwrite)
            left = missing_parts(work)
            if len(left) < self._parts:
                there = self._parts - len(left)
                self._progress.say(f"{work.name}: {there} of {self._parts} parts are there")
            self._encode(work, left, processes)
            return join(work, self.output, self._progress, overwrite=self._overwrite)

    def _found(self) -> Workplace | None:
        return self._cut.find(overwrite=self._overwrite)

    def _open(self, *, train: bool, overwrite: bool) -> Workplace:
        return self._cut.open(self._progress, train=train, overwrite=overwrite)

    def _encode(self, work: Workplace, numbers: list[int], processes: int) -> None:
        """Encodes parts, with one line of progress for all of them."""
        if not numbers:
            return
        # How much each part has is known when it is cut; a share of the whole is near enough.
        self._progress.start("encoding", work.sources.total_bytes * len(numbers) // self._parts)
        if processes > 1:
            files = Work(self._asked, str(self.output), self._parts)
            total = encode_in_processes(files, numbers, processes, self._progress.update)
        else:
            total = [0, 0]
            for number in numbers:
                before = tuple(total)

                def update(read: int, tokens: int, before: tuple[int, ...] = before) -> None:
                    self._progress.update(before[0] + read, before[1] + tokens)

                done = encode_part(work, number, update)
                total[0] += done.bytes_read
                total[1] += sum(split.tokens for split in done.splits.values())
        self._progress.finish(*total)
