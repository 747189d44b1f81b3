"""The plan that all parts of a text share: `plan.json`, in the folder of the parts.

The folder is beside the DIR that is prepared: `.DIR.parts` if the user asked for parts, so that
every node of a cluster finds it, otherwise `.DIR.partial`, in which one process works alone. It
contains the plan, the tokenizer, and a folder for each finished part.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.files import flush_to_disk, whole_file
from polyad.data.prepared import LOCK_FILE, Sha256, SplitName, seal
from polyad.data.progress import Progress
from polyad.data.text.job import Job
from polyad.data.text.manifest import TOKENIZER_FILES, Request, TokenizerFile
from polyad.data.text.source import Sources
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.tokenizer import Tokenizer, all_cores

PLAN_FILE = "plan.json"
LAUNCH_FOLDER = "launch"
"""Folder of the scheduler's scripts and the output of their jobs."""
MOST_PARTS = 100_000

_OURS = re.compile(
    rf"(\.?{re.escape(PLAN_FILE)}.*|\.?tokenizer\.(json|model).*|\.?part-\d{{5}}(\..*)?)"
)


class Plan(Config):
    """The request and how the text is cut; parts of different plans cannot be combined."""

    request: Request
    parts: int = Field(ge=1, le=MOST_PARTS)
    """How many."""
    cut: dict[SplitName, str]
    """The unit in which each source is cut; it differs with `--streaming`."""
    tokenizer_file: TokenizerFile
    end_of_text: str
    tokenizer_fingerprint: Sha256

    def digest(self) -> str:
        """Identifies the plan."""
        return seal(self.model_dump(mode="json"))


@dataclass(frozen=True)
class Workplace:
    """The folder of the parts, and what is needed to make them.

    Attributes:
        folder: The folder.
        plan: The plan that they share.
        sources: The whole text.
        tokenizer: The tokenizer that encodes the text.
        asked: Whether the user asked for parts, and so knows about the folder.
    """

    folder: Path
    plan: Plan
    sources: Sources
    tokenizer: Tokenizer
    asked: bool

    def part_folder(self, number: int) -> Path:
        """Returns the path of a finished part."""
        return self.folder / f"part-{number:05}"

    def damaged(self, file: Path, how: str) -> DataError:
        """Returns the error for a damaged file of a part.

        Args:
            file: The file.
            how: What is wrong with it.
        """
        what_to_do = "run the same command again to start over"
        if self.asked:
            what_to_do = f"delete {file.parent.name} there, and run the same command again"
        return DataError(f"{file}: damaged: it {how}; {what_to_do}")


@dataclass(frozen=True)
class Cut:
    """A text to cut into parts.

    Attributes:
        job: The request.
        sources: The whole text.
        output: The folder to prepare.
        parts: How many parts.
        asked: Whether the user asked for parts.
    """

    job: Job
    sources: Sources
    output: Path
    parts: int
    asked: bool = True

    @property
    def folder(self) -> Path:
        """Where the parts are made; hidden, so that a search for text files skips it."""
        return self.output.parent / f".{self.output.name}.{'parts' if self.asked else 'partial'}"

    def find(self, *, overwrite: bool = False) -> Workplace | None:
        """Opens the folder of the parts, if the same request has created it.

        Args:
            overwrite: Whether to ignore parts of another request.

        Returns:
            The folder and its content; None if it has to be created. If the user did not ask for
            parts, this includes a folder of another request, and a damaged one.

        Raises:
            DataError: It holds parts of another request, or is damaged.
        """
        try:
            return self._opened(overwrite=overwrite)
        except DataError:
            if self.asked:
                raise
            return None

    def open(self, progress: Progress, *, train: bool, overwrite: bool) -> Workplace:
        """Opens the folder of the parts, creating it if needed.

        Args:
            progress: Reports the progress of training the tokenizer.
            train: Whether a missing tokenizer may be trained.
            overwrite: Whether parts of another request are removed.

        Returns:
            The folder and its content.

        Raises:
            DataError: It holds parts of another request, or something else; or the tokenizer has to
                be trained first.
            OSError: It cannot be written.
        """
        found = self.find(overwrite=overwrite)
        if found is None:
            another = overwrite and (plan := _read(self.folder)) and self._difference(plan)
            if another or not self.asked:
                self.remove()
            self._make(progress, train=train)
            found = self._opened(overwrite=False)
            assert found is not None
        return found

    def holds_work(self) -> bool:
        """Returns whether the folder holds expensive work: a part, or a trained tokenizer."""
        begun = (self.folder / PLAN_FILE).exists()
        return begun and (self.job.tokenizer is None or any(self.folder.glob("part-*")))

    def remove(self) -> None:
        """Removes the parts and the plan; scripts and job output are kept."""
        # The plan goes first: parts are useless without one.
        for name in (PLAN_FILE, *TOKENIZER_FILES):
            (self.folder / name).unlink(missing_ok=True)
        for path in list(self.folder.iterdir()) if self.folder.exists() else ():
            if _OURS.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _opened(self, *, overwrite: bool) -> Workplace | None:
        folder, plan = self.folder, _read(self.folder)
        if plan is None:
            return None
        if why := self._difference(plan):
            if overwrite:
                return None
            raise DataError(
                f"{folder}: holds parts of another request: {why}; delete this folder, or add "
                "--overwrite if no part is being prepared"
            )
        tokenizer = load_tokenizer(folder / plan.tokenizer_file, plan.end_of_text)
        if tokenizer.fingerprint != plan.tokenizer_fingerprint:
            raise DataError(
                f"{folder / plan.tokenizer_file}: not the tokenizer with which the parts were "
                f"started; delete {folder}"
            )
        return Workplace(folder, plan, self.sources, tokenizer, self.asked)

    def _cut_by(self) -> dict[SplitName, str]:
        return {name: source.cut_by() for name, source in self.sources.by_split.items()}

    def _difference(self, plan: Plan) -> str | None:
        """Names the first difference from the plan."""
        if plan.parts != self.parts:
            return f"--parts was {plan.parts}, not {self.parts}"
        before, after = plan.request.model_dump(), self.job.request.model_dump()
        for name, value in after.items():
            if before[name] != value:
                if name == "listings":
                    return "files of the text have changed since"
                return f"{name} was {before[name]!r:.80}, not {value!r:.80}"
        if plan.cut != self._cut_by():
            return "the text was read in another way, as with --streaming or without"
        return None

    def _make(self, progress: Progress, *, train: bool) -> None:
        folder, request = self.folder, self.job.request
        if self.job.tokenizer is None and not train:
            raise DataError(
                f"{folder}: the tokenizer {request.tokenizer} is not trained yet; run the same "
                "command once with --begin instead of the step"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.name not in (LAUNCH_FOLDER, LOCK_FILE) and not _OURS.fullmatch(path.name):
                raise DataError(
                    f"{folder}: is the folder for the parts, but contains {path.name!r}, which "
                    "`polyad prepare` did not write; choose another --output"
                )
        with all_cores():
            tokenizer = self.job.tokenizer or self.job.train(self.sources, progress)
        plan = Plan(
            request=request,
            parts=self.parts,
            cut=self._cut_by(),
            tokenizer_file=tokenizer.file_name,
            end_of_text=tokenizer.end_of_text,
            tokenizer_fingerprint=tokenizer.fingerprint,
        )
        # Several processes may do this at once; they all write the same content.
        for name, content in (
            (plan.tokenizer_file, tokenizer.file_bytes()),
            (PLAN_FILE, plan.model_dump_json(indent=2).encode() + b"\n"),
        ):
            with whole_file(folder / name) as draft:
                draft.write_bytes(content)
                flush_to_disk(draft)
        flush_to_disk(folder)


def _read(folder: Path) -> Plan | None:
    path = folder / PLAN_FILE
    try:
        return Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise DataError(f"{path}: cannot be read: {reason}; delete {folder}") from None
