"""What all parts of a text have in common: `plan.json`, in the folder where they are made.

The folder is `.DIR.parts`, beside the DIR that is prepared, so that every host of a cluster finds
it. It holds the plan, the tokenizer, and a folder for each part that is finished.
"""

import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.progress import Progress
from polyad.data.text.job import Job
from polyad.data.text.manifest import (
    TOKENIZER_FILES,
    Request,
    Sha256,
    SplitName,
    TokenizerFile,
    flush_to_disk,
    seal,
)
from polyad.data.text.splits import Sources
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.tokenizer import Tokenizer, all_cores

PLAN_FILE = "plan.json"
LAUNCH_FOLDER = "launch"
"""Where scripts for a scheduler stand, and what their jobs say."""
MOST_PARTS = 100_000

_OURS = re.compile(
    rf"(\.?{re.escape(PLAN_FILE)}.*|\.?tokenizer\.(json|model).*|\.?part-\d{{5}}(\..*)?)"
)


class Plan(Config):
    """What is asked for, and how it is cut: parts of another plan do not go with these."""

    request: Request
    parts: int = Field(ge=1, le=MOST_PARTS)
    """How many."""
    cut: dict[SplitName, str]
    """What parts of each source are counted in: it differs with `--streaming`."""
    tokenizer_file: TokenizerFile
    end_of_text: str
    tokenizer_fingerprint: Sha256

    def digest(self) -> str:
        """Names the plan."""
        return seal(self.model_dump(mode="json"))


@dataclass(frozen=True)
class Workplace:
    """The folder of the parts, and what it takes to make them.

    Attributes:
        folder: `.DIR.parts`.
        plan: What they have in common.
        job: The request.
        sources: The whole text.
        tokenizer: Encodes it.
    """

    folder: Path
    plan: Plan
    job: Job
    sources: Sources
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """Of the folder, for messages."""
        return str(self.folder)

    def part_folder(self, number: int) -> Path:
        """Where a finished part is."""
        return self.folder / f"part-{number:05}"

    def remove(self) -> None:
        """Removes the parts and the plan; scripts and what jobs said stay."""
        _remove(self.folder)


@dataclass(frozen=True)
class Cut:
    """A text that is to be cut.

    Attributes:
        job: The request.
        sources: The whole text.
        output: The folder that is prepared.
        parts: How many parts.
    """

    job: Job
    sources: Sources
    output: Path
    parts: int

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= MOST_PARTS:
            raise DataError(f"--parts: {self.parts} is not allowed; 1 to {MOST_PARTS:,}")

    @property
    def folder(self) -> Path:
        """`.DIR.parts`, which a search for text files passes over."""
        return self.output.parent / f".{self.output.name}.parts"

    def find(self, *, overwrite: bool = False) -> Workplace | None:
        """Opens the folder of the parts, if the same request has begun it.

        Args:
            overwrite: Whether parts of another request are as good as none.

        Returns:
            The folder and what is in it; None where it has to be made.

        Raises:
            DataError: It holds parts of another request, or is damaged.
        """
        folder, plan = self.folder, _read(self.folder)
        if plan is None:
            return None
        if why := self._difference(plan):
            if overwrite:
                return None
            raise DataError(
                f"{folder}: holds parts of another request: {why}; delete this folder, or add "
                "--overwrite where no part is being made"
            )
        tokenizer = load_tokenizer(folder / plan.tokenizer_file, plan.end_of_text)
        if tokenizer.fingerprint != plan.tokenizer_fingerprint:
            raise DataError(
                f"{folder / plan.tokenizer_file}: not the tokenizer that the parts were begun "
                f"with; delete {folder}"
            )
        return Workplace(folder, plan, self.job, self.sources, tokenizer)

    def open(self, progress: Progress, *, train: bool, overwrite: bool) -> Workplace:
        """Opens the folder of the parts; it is made where there is none.

        Args:
            progress: Of a training of the tokenizer.
            train: Whether a tokenizer may be trained that is not there yet.
            overwrite: Whether parts of another request are removed.

        Returns:
            The folder and what is in it.

        Raises:
            DataError: It holds parts of another request, or something else; or the tokenizer is to
                be trained first.
        """
        found = self.find(overwrite=overwrite)
        if found is None:
            try:
                if overwrite and (plan := _read(self.folder)) and self._difference(plan):
                    _remove(self.folder)
                self._make(progress, train=train)
            except OSError as error:
                reason = error.strerror or error
                raise DataError(f"{self.folder}: cannot be written: {reason}") from error
            found = self.find()
            assert found is not None
        return found

    def _cut_by(self) -> dict[SplitName, str]:
        return {name: source.cut_by() for name, source in self.sources.by_split.items()}

    def _difference(self, plan: Plan) -> str | None:
        """Names the first thing that is not as planned."""
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
                f"{folder}: the tokenizer {request.tokenizer} is not trained yet; give the same "
                "command once with --begin in place of the step"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.name != LAUNCH_FOLDER and not _OURS.fullmatch(path.name):
                raise DataError(
                    f"{folder}: is where the parts are made, and holds {path.name!r}, which "
                    "`polyad prepare` did not make; choose another --output"
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
        # Several processes may do this at once: each writes the same.
        mine = f"{socket.gethostname()}-{os.getpid()}"
        draft = folder / f".{plan.tokenizer_file}.{mine}"
        tokenizer.save(draft)
        _put(draft, folder / plan.tokenizer_file)
        draft = folder / f".{PLAN_FILE}.{mine}"
        draft.write_text(plan.model_dump_json(indent=2) + "\n", encoding="utf-8")
        _put(draft, folder / PLAN_FILE)


def _read(folder: Path) -> Plan | None:
    path = folder / PLAN_FILE
    try:
        return Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise DataError(f"{path}: cannot be read: {reason}; delete {folder}") from None


def _put(draft: Path, path: Path) -> None:
    flush_to_disk(draft)
    os.replace(draft, path)
    flush_to_disk(path.parent)


def _remove(folder: Path) -> None:
    # The plan goes first: parts without one are of no use to anybody.
    for path in (folder / PLAN_FILE, *(folder / name for name in TOKENIZER_FILES)):
        path.unlink(missing_ok=True)
    for path in list(folder.iterdir()):
        if _OURS.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
