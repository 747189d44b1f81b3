"""The request of `polyad prepare`: checks it, opens the text, loads or trains the tokenizer."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict

from polyad.data.errors import DataError
from polyad.data.prepared import SPLITS, LeftOut, SplitName
from polyad.data.progress import Progress
from polyad.data.text.documents import (
    TEXT_KEY,
    DocumentKind,
    FileFormat,
    FileSource,
    open_source,
    open_splits,
)
from polyad.data.text.hub import DatasetSource
from polyad.data.text.manifest import Request
from polyad.data.text.source import Skipped, Source, Sources, documents_needed
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.data.text.tokenizers.training import resolve_tokenizer, training_wanted
from polyad.data.text.writer import PieceCutter

HELD_OUT = 0.05
"""Default share of the text held out for each split that has no source of its own."""


class _How(TypedDict):
    """Options for reading every source."""

    text_key: str
    streaming: bool
    documents: DocumentKind
    file_format: FileFormat | None


class Job(NamedTuple):
    """A request whose text is open.

    Attributes:
        request: The request.
        by_split: The sources, by split.
        fractions: The shares held out of the first source.
        tokenizer: The given tokenizer; None if one is to be trained.
        notes: Messages for the user.
        files: Number of files read, by extension.
        left_out: How much of the text is not read, by reason.
    """

    request: Request
    by_split: dict[SplitName, Source]
    fractions: dict[SplitName, float]
    tokenizer: Tokenizer | None
    notes: tuple[str, ...]
    files: Mapping[str, int]
    left_out: Mapping[str, int]

    def sources(self, progress: Progress) -> Sources:
        """Decides how to hold text out; this may read some lines to see if there are enough
        documents.

        Args:
            progress: Receives a message if text is held out by position.
        """
        train = self.by_split["train"]
        needed = documents_needed(self.fractions)
        if not (isinstance(train, FileSource) and train.is_text_of_fewer_documents(needed)):
            return Sources(self.by_split, self.fractions, "documents")
        progress.say(
            f"{self.request.source}: too few documents to divide among splits, so the text is "
            "split by position: its last parts are held out"
        )
        # The global position of a line is known only after all lines before it have been read.
        cut = not train.can_be_cut_in_files
        return Sources(self.by_split, self.fractions, "position", can_be_cut=cut)

    def train(self, sources: Sources, progress: Progress) -> Tokenizer:
        """Trains the tokenizer on the train split: held-out text must not shape the vocabulary.

        Args:
            sources: All of the text.
            progress: The progress of the training.

        Returns:
            The tokenizer, which depends only on the request.
        """
        done = 0

        def texts() -> Iterator[str]:
            nonlocal done
            train_only = sources._replace(by_split={"train": sources.by_split["train"]})
            cutter = PieceCutter()
            progress.start("training the tokenizer", train_only.total_bytes)
            for split, document in train_only.assigned(Skipped()):
                done = document.bytes_read
                progress.update(done)
                if split == "train":
                    yield from cutter.add(document.text, is_last=document.is_last)
                    if document.is_last:
                        yield cutter.take_rest()

        request = self.request
        trained = resolve_tokenizer(
            request.tokenizer, end_of_text=request.end_of_text, training_texts=texts
        )
        progress.finish(done)
        return trained


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to prepare, and how."""

    source: str
    """`python-stdlib`, a file, a folder, or a Hugging Face data set, whose own splits are used if
    it has them; see `polyad.data.text.documents.open_source`."""
    tokenizer: str
    """`train:VOCAB_SIZE`, `words`, `words:VOCAB_SIZE`, `characters`, `wordpiece:VOCAB_SIZE`, a
    path, or a name on the Hugging Face hub."""
    validation_fraction: float | None = None
    """Share of the text held out for validation, at least 0. If the source is text files with
    too few documents, the share is of the text, taken from its end. None: `HELD_OUT` if the split
    has no source of its own."""
    test_fraction: float | None = None
    """Share held out for the test, in the same way."""
    validation_source: str | None = None
    """Text to use as the validation split instead."""
    test_source: str | None = None
    """Text to use as the test split instead."""
    text_key: str = TEXT_KEY
    """Key or column of the text in `.jsonl` and `.parquet` files and data sets."""
    end_of_text: str | None = None
    """The token that ends each document; None for a well-known one."""
    streaming: bool = False
    """Whether Hugging Face data sets are read without a copy on disk; the result is the same."""
    documents: DocumentKind = "files"
    """What counts as a document of a text file: `files`, the whole file, or `lines`."""
    file_format: FileFormat | None = None
    """`text` reads files as text whatever their extension; None: by extension."""
    accept: bool = False
    """Whether to prepare text despite a likely mistake, such as files of a folder that are not
    read."""

    def open(self) -> Job:
        """Opens the text, and loads the tokenizer if one is given.

        Returns:
            The open job.

        Raises:
            DataError: An option, the text or the tokenizer is invalid.
        """
        _check_words(
            source=self.source,
            tokenizer=self.tokenizer,
            validation_source=self.validation_source,
            test_source=self.test_source,
            text_key=self.text_key,
            end_of_text=self.end_of_text,
        )
        given: dict[SplitName, float | None] = {
            "validation": self.validation_fraction,
            "test": self.test_fraction,
        }
        fractions = _checked_fractions(
            {name: HELD_OUT if share is None else share for name, share in given.items()}
        )
        by_split = self._opened()
        self._check_used(by_split, given)
        fractions |= {name: 0.0 for name in by_split if name in fractions}
        to_train = training_wanted(self.tokenizer) is not None
        loaded = (
            None if to_train else resolve_tokenizer(self.tokenizer, end_of_text=self.end_of_text)
        )
        notes: tuple[str, ...] = ()
        if loaded is not None and (chance := loaded.chance()) is not None:
            loaded = loaded.without_chance()
            note = f"{chance} is turned off: it would encode the same text differently each time"
            notes = (f"{self.tokenizer}: {note}",)
        request = Request(
            source=self.source,
            validation_source=self.validation_source,
            test_source=self.test_source,
            tokenizer=loaded.fingerprint if loaded else self.tokenizer,
            end_of_text=self.end_of_text,
            validation_fraction=fractions["validation"],
            test_fraction=fractions["test"],
            text_key=self.text_key,
            listings={name: text.listing_digest() for name, text in by_split.items()},
            documents=self._kind_of_documents(by_split),
            file_format=self.file_format,
        )
        files, left_out = self._counted(by_split)
        return Job(request, by_split, fractions, loaded, notes, files, left_out)

    def _opened(self) -> dict[SplitName, Source]:
        how: _How = {
            "text_key": self.text_key,
            "streaming": self.streaming,
            "documents": self.documents,
            "file_format": self.file_format,
        }
        by_split = open_splits(self.source, **how)
        held_out: dict[SplitName, str | None] = {
            "validation": self.validation_source,
            "test": self.test_source,
        }
        for name, spec in held_out.items():
            if spec is not None:
                by_split[name] = open_source(spec, split=name, **how)
        return {name: by_split[name] for name in SPLITS if name in by_split}

    def _counted(
        self, by_split: dict[SplitName, Source]
    ) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Counts files that are read and what is left out; refuses likely mistakes."""
        files, left_out = Counter[str](), Counter[str]()
        seen: list[LeftOut] = []
        options = {self.validation_source: "validation-source", self.test_source: "test-source"}
        for text in by_split.values():
            if isinstance(text, FileSource):
                files += text.taken()
            if isinstance(text, FileSource | DatasetSource) and text.left_out not in seen:
                option = options.get(text.spec, "source")
                text.left_out.check(f"--{option}: {text.spec}", accept=self.accept)
                seen.append(text.left_out)
                left_out += text.left_out.counts
        return files, left_out

    def _check_used(
        self, by_split: dict[SplitName, Source], shares: dict[SplitName, float | None]
    ) -> None:
        """Refuses options that have no effect for this text."""
        for name, share in shares.items():
            if share and name in by_split:
                given = by_split[name].spec
                own = f"{given} has that split" if given == self.source else f"{given} is it"
                raise DataError(
                    f"--{name}-fraction: {share} is not held out, because {own}; remove the option"
                )
        files = [text for text in by_split.values() if isinstance(text, FileSource)]
        if len(files) == len(by_split):
            if self.streaming:
                raise DataError(
                    f"--streaming: applies only to Hugging Face data sets, and {self.source} is "
                    "not one"
                )
            if self.text_key != TEXT_KEY and not any(each.has_keys for each in files):
                raise DataError(
                    f"--text-key: {self.text_key!r} applies only to .jsonl and .parquet files and "
                    f"data sets, and {self.source} has none"
                )

    def _kind_of_documents(
        self, by_split: dict[SplitName, Source]
    ) -> Literal["files", "lines"] | None:
        """Returns what a document of a text file is; None if there are none and none is set."""
        if any(isinstance(each, FileSource) and each.has_text_files for each in by_split.values()):
            return self.documents
        if self.documents != "files":
            raise DataError(
                f"--documents: {self.documents} applies only to text files, and {self.source} has "
                "none"
            )
        if self.file_format is not None:
            raise DataError(
                f"--format: {self.file_format} applies only to files, and {self.source} is not one"
            )
        return None


def _check_words(**given: str | None) -> None:
    """Refuses empty strings, as from an unset shell variable, and what a manifest cannot hold."""
    for name, text in given.items():
        if text == "" and name != "text_key":
            raise DataError(f"--{name.replace('_', '-')}: is empty")
        if text is not None and any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"--{name.replace('_', '-')}: {text!r} is not text in UTF-8")


def _checked_fractions(fractions: dict[SplitName, float]) -> dict[SplitName, float]:
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise DataError(
                f"--{name}-fraction: {fraction} is not allowed; it must be at least 0 and below 1"
            )
    if sum(fractions.values()) >= 1:
        both = " + ".join(str(fraction) for fraction in fractions.values())
        raise DataError(
            f"--validation-fraction and --test-fraction: {both} leaves nothing to train on"
        )
    return fractions
