"""Text to a folder of tokens: split by document, encoded, written, sealed with a manifest."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypedDict

from data.errors import DataError, user_path
from data.progress import Progress, Report
from data.text.documents import DocumentKind, FileFormat, FileSource, open_source, open_splits
from data.text.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SPLITS,
    Manifest,
    Request,
    SplitName,
    TokenizerInfo,
    data_fingerprint,
)
from data.text.resume import Resume, read_resume, remove_resume, save_resume
from data.text.source import Skipped, Source
from data.text.splits import Sources, documents_needed
from data.text.staging import check_replaceable, staged_folder
from data.text.tokenizers.files import load_tokenizer
from data.text.tokenizers.pieces import PieceCutter
from data.text.tokenizers.tokenizer import Tokenizer, all_cores
from data.text.tokenizers.training import resolve_tokenizer, training_wanted
from data.text.writer import DatasetWriter

SAVE_SECONDS = 30.0
"""An interrupted call loses at most this much of its work."""


class _How(TypedDict):
    """Options for reading every source."""

    text_key: str
    streaming: bool
    documents: DocumentKind
    file_format: FileFormat | None


def prepare(
    source: str,
    tokenizer: str,
    output: str | Path,
    *,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.05,
    validation_source: str | None = None,
    test_source: str | None = None,
    text_key: str = "text",
    end_of_text: str | None = None,
    streaming: bool = False,
    documents: DocumentKind = "files",
    file_format: FileFormat | None = None,
    overwrite: bool = False,
    report: Report | None = None,
) -> Manifest:
    """Turns text into a folder that training reads.

    The text is streamed, once, and once before to train a tokenizer (on the documents of the train
    split alone). The folder appears complete or not at all. If it exists and was prepared from the
    same request, it is kept and nothing is read; if such a request was interrupted, the files are
    those that it would have written, and only what it had not yet saved is encoded.

    Args:
        source: `python-stdlib`, a file, a folder or a Hugging Face data set, whose own splits are
            taken where it has them; see `data.text.open_source`.
        tokenizer: `train:VOCAB_SIZE`, `words`, `words:VOCAB_SIZE`, `characters`,
            `wordpiece:VOCAB_SIZE`, a path or a name of the Hugging Face hub; see
            `data.text.tokenizers.training.resolve_tokenizer`.
        output: The folder to make.
        validation_fraction: Share of the documents held out for validation, at least 0; where
            all is text files and their documents are too few, of the text, its last parts.
        test_fraction: Share held out for the test, at least 0.
        validation_source: Text that is the validation split instead.
        test_source: Text that is the test split instead.
        text_key: Key or column of the text in `.jsonl` and `.parquet` files and data sets.
        end_of_text: The token that ends each document; None takes a well-known one.
        streaming: Whether Hugging Face data sets are read without a copy on the disk; the result
            is the same.
        documents: What a document of a text file is: `files`, all of it, or `lines`.
        file_format: `text` reads files as text whatever their names end in; None goes by the names.
        overwrite: Whether prepared data in `output` may be replaced.
        report: Receives each line of progress; None writes them to standard error.

    Returns:
        The manifest of the folder.

    Raises:
        DataError: An argument, the text, the tokenizer or the output folder will not do.
    """
    _check_words(
        source=source,
        tokenizer=tokenizer,
        validation_source=validation_source,
        test_source=test_source,
        text_key=text_key,
        end_of_text=end_of_text,
    )
    fractions = _checked_fractions({"validation": validation_fraction, "test": test_fraction})
    how: _How = {
        "text_key": text_key,
        "streaming": streaming,
        "documents": documents,
        "file_format": file_format,
    }
    by_split = open_splits(source, **how)
    held_out: dict[SplitName, str | None] = {"validation": validation_source, "test": test_source}
    for name, spec in held_out.items():
        if spec is not None:
            by_split[name] = open_source(spec, split=name, **how)
    by_split = {name: by_split[name] for name in SPLITS if name in by_split}
    fractions |= {name: 0.0 for name in by_split if name in fractions}
    to_train = training_wanted(tokenizer) is not None
    loaded = None if to_train else resolve_tokenizer(tokenizer, end_of_text=end_of_text)
    chance = loaded.chance() if loaded else None
    if loaded is not None and chance is not None:
        loaded = loaded.without_chance()
    request = Request(
        source=source,
        validation_source=validation_source,
        test_source=test_source,
        tokenizer=loaded.fingerprint if loaded else tokenizer,
        end_of_text=end_of_text,
        validation_fraction=fractions["validation"],
        test_fraction=fractions["test"],
        text_key=text_key,
        listings={name: text.listing_digest() for name, text in by_split.items()},
        documents=_kind_of_documents(source, by_split, documents, file_format),
        file_format=file_format,
    )
    output = user_path(output).resolve()
    progress = Progress(report)
    if chance is not None:
        progress.say(
            f"{tokenizer}: {chance} is switched off: it would encode the same text differently"
        )
    if existing := _prepared_before(output, request):
        progress.say(f"{output}: already prepared from the same text and options; kept as it is")
        return existing
    check_replaceable(output, overwrite=overwrite)
    sources = Sources(by_split, fractions, _how_to_split(by_split["train"], fractions))
    if sources.split_by == "position":
        progress.say(
            f"{source}: too few documents to deal out; split by position: the last parts are held "
            "out"
        )
    with (
        contextlib.closing(progress),
        all_cores(),
        staged_folder(output, lambda folder: read_resume(folder, request) is not None) as folder,
    ):
        resume = read_resume(folder, request)
        if resume is not None:
            progress.say(f"{output}: goes on behind {resume.documents:,} documents or parts")
            chosen = load_tokenizer(folder / resume.tokenizer_file, resume.end_of_text)
        else:
            chosen = loaded or _train(sources, tokenizer, end_of_text, progress)
            chosen.save(folder / chosen.file_name)
        manifest = _write(sources, chosen, request, folder, progress, resume)
        if _prepared_before(output, request) is None:  # or another call has prepared it meanwhile
            check_replaceable(output, overwrite=overwrite)
    _summarize(manifest, output, progress)
    return manifest


def _kind_of_documents(
    spec: str,
    by_split: dict[SplitName, Source],
    documents: DocumentKind,
    file_format: FileFormat | None,
) -> DocumentKind | None:
    """What a document of a text file is; None if there are no text files and no option says it."""
    if any(isinstance(each, FileSource) and each.has_text_files for each in by_split.values()):
        return documents
    if documents != "files":
        raise DataError(f"--documents: {documents} is of text files, and {spec} has none")
    if file_format is not None:
        raise DataError(f"--format: {file_format} is of files, and {spec} is none")
    return None


def _how_to_split(
    source: Source, fractions: dict[SplitName, float]
) -> Literal["documents", "position"]:
    needed = documents_needed(fractions)
    few = isinstance(source, FileSource) and source.is_text_of_fewer_documents(needed)
    return "position" if few else "documents"


def _train(sources: Sources, spec: str, end_of_text: str | None, progress: Progress) -> Tokenizer:
    """Trains the tokenizer on the train split: held-out text must not shape the vocabulary."""
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

    trained = resolve_tokenizer(spec, end_of_text=end_of_text, training_texts=texts)
    progress.finish(done)
    return trained


def _write(
    sources: Sources,
    tokenizer: Tokenizer,
    request: Request,
    folder: Path,
    progress: Progress,
    resume: Resume | None,
) -> Manifest:
    skipped = Skipped()
    saved = (resume.splits, resume.held) if resume else (None, "")
    writer = DatasetWriter(folder, tokenizer, *saved)
    done = resume.documents if resume else 0
    trained = training_wanted(request.tokenizer) is not None
    # A trained tokenizer is saved before any text is encoded, since training takes long.
    saved_at = -SAVE_SECONDS if trained and not resume else time.monotonic()
    with contextlib.closing(writer):
        progress.start("encoding", sources.total_bytes)
        for number, (split, document) in enumerate(sources.assigned(skipped)):
            if number < done:
                continue  # already encoded; reading it again is a small part of the work
            if time.monotonic() - saved_at >= SAVE_SECONDS:
                states = writer.states()
                save_resume(folder, request, tokenizer, number, states, writer.held)
                saved_at = time.monotonic()
            writer.add(split, document.text, document.name, document.is_last)
            progress.update(document.bytes_read, writer.tokens)
        splits = writer.finish()
        progress.finish(sources.total_bytes, writer.tokens)
    for count, what in (
        (writer.cut_documents, "documents go on in another one: 2,147,483,647 tokens is the most"),
        (writer.forced_cuts, "cuts of long documents at line ends: tokens beside them may differ"),
    ):
        if count:
            progress.say(f"{count:,} {what}")
    for name, source in sources.by_split.items():
        if splits[name].documents == 0:
            raise DataError(f"{source.spec}: no text in it (for the {name} split)")
    info = TokenizerInfo(
        fingerprint=tokenizer.fingerprint,
        file=tokenizer.file_name,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_id=tokenizer.end_of_text_id,
    )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        request=request,
        tokenizer=info,
        splits=splits,
        dtype="uint16" if writer.dtype.itemsize == 2 else "int32",
        skipped_empty=skipped.empty,
        skipped_unreadable=skipped.unreadable,
        split_by=sources.split_by,
        fingerprint=data_fingerprint(splits, info),
    )
    remove_resume(folder)
    return manifest.write(folder)


def _prepared_before(output: Path, request: Request) -> Manifest | None:
    """Returns the manifest of existing data if it is complete and of the same request."""
    from data.text.dataset import PreparedData

    if not (output / MANIFEST_FILE).is_file():
        return None
    try:
        manifest = PreparedData.open(output).manifest
    except DataError:
        return None  # damaged: replaced with --overwrite, refused without
    return manifest if manifest.request == request else None


def _check_words(**given: str | None) -> None:
    """Refuses empty texts, as of an unset shell variable, and what a manifest cannot hold."""
    for name, text in given.items():
        if text == "" and name != "text_key":
            raise DataError(f"--{name.replace('_', '-')}: is empty")
        if text is not None and any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"--{name.replace('_', '-')}: {text!r} is not text in UTF-8")


def _checked_fractions(fractions: dict[SplitName, float]) -> dict[SplitName, float]:
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise DataError(
                f"--{name}-fraction: {fraction} is not allowed; a share of at least 0 and below 1"
            )
    if sum(fractions.values()) >= 1:
        both = " + ".join(str(fraction) for fraction in fractions.values())
        raise DataError(
            f"--validation-fraction and --test-fraction: {both} leaves nothing to train on"
        )
    return fractions


def _summarize(manifest: Manifest, output: Path, progress: Progress) -> None:
    request = manifest.request
    is_requested = {
        "train": True,
        "validation": bool(request.validation_fraction),
        "test": bool(request.test_fraction),
    }
    for name in SPLITS:
        split = manifest.splits[name]
        progress.say(f"{name}: {split.documents:,} documents, {split.tokens:,} tokens")
        if is_requested[name] and split.documents == 0:
            progress.say(f"warning: too few documents in {request.source} for a {name} split")
    for count, what in (
        (manifest.skipped_empty, "documents without text"),
        (manifest.skipped_unreadable, "unreadable files"),
    ):
        if count:
            progress.say(f"left out: {count:,} {what}")
    progress.say(f"prepared {output} (vocabulary of {manifest.tokenizer.vocab_size:,})")
