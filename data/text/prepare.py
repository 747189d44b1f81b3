"""Text to a folder of tokens: split by document, encoded, written, sealed with a manifest."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from polyad.data.errors import DataError, user_path
from polyad.data.left_out import in_words
from polyad.data.progress import Progress, Report
from polyad.data.text.documents import TEXT_KEY, DocumentKind, FileFormat
from polyad.data.text.job import Asked, Job
from polyad.data.text.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SPLITS,
    Manifest,
    Request,
    SplitInfo,
    SplitName,
    TokenizerInfo,
    data_fingerprint,
)
from polyad.data.text.resume import Resume, read_resume, remove_resume, save_resume
from polyad.data.text.source import Skipped
from polyad.data.text.split_writer import token_dtype
from polyad.data.text.splits import Sources
from polyad.data.text.staging import check_replaceable, staged_folder
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.tokenizer import Tokenizer, all_cores
from polyad.data.text.tokenizers.training import training_wanted
from polyad.data.text.writer import DatasetWriter

SAVE_SECONDS = 30.0
"""An interrupted call loses at most this much of its work."""


def prepare(
    source: str,
    tokenizer: str,
    output: str | Path,
    *,
    validation_fraction: float | None = None,
    test_fraction: float | None = None,
    validation_source: str | None = None,
    test_source: str | None = None,
    text_key: str = TEXT_KEY,
    end_of_text: str | None = None,
    streaming: bool = False,
    documents: DocumentKind = "files",
    file_format: FileFormat | None = None,
    accept: bool = False,
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
            `polyad.data.text.tokenizers.training.resolve_tokenizer`.
        output: The folder to make.
        validation_fraction: Share of the documents held out for validation, at least 0; where
            all is text files and their documents are too few, of the text, its last parts. None:
            `polyad.data.text.job.HELD_OUT` where the split does not come from elsewhere.
        test_fraction: Share held out for the test, in the same way.
        validation_source: Text that is the validation split instead.
        test_source: Text that is the test split instead.
        text_key: Key or column of the text in `.jsonl` and `.parquet` files and data sets.
        end_of_text: The token that ends each document; None takes a well-known one.
        streaming: Whether Hugging Face data sets are read without a copy on the disk; the result
            is the same.
        documents: What a document of a text file is: `files`, all of it, or `lines`.
        file_format: `text` reads files as text whatever their names end in; None goes by the names.
        accept: Whether text is prepared although something is probably a mistake, as files of a
            folder that are not read.
        overwrite: Whether prepared data in `output` may be replaced.
        report: Receives each line of progress; None writes them to standard error.

    Returns:
        The manifest of the folder.

    Raises:
        DataError: An argument, the text, the tokenizer or the output folder will not do, or an
            argument would change nothing for this text.
    """
    asked = Asked(
        source=source,
        tokenizer=tokenizer,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        validation_source=validation_source,
        test_source=test_source,
        text_key=text_key,
        end_of_text=end_of_text,
        streaming=streaming,
        documents=documents,
        file_format=file_format,
        accept=accept,
    )
    job, output, progress = asked.open(), user_path(output).resolve(), Progress(report)
    request = job.request
    if existing := begin(job, output, progress, overwrite=overwrite):
        return existing
    sources = job.sources(progress)
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
            chosen = job.tokenizer or job.train(sources, progress)
            chosen.save(folder / chosen.file_name)
        manifest = _write(sources, chosen, job, folder, progress, resume)
        check_still_replaceable(request, output, overwrite=overwrite)
    summarize(manifest, output, progress)
    return manifest


def begin(job: Job, output: Path, progress: Progress, *, overwrite: bool) -> Manifest | None:
    """Says what there is to say of a request, and looks at the folder that it is to make.

    Args:
        job: The request.
        output: The folder.
        progress: Receives the lines.
        overwrite: Whether prepared data there may be replaced.

    Returns:
        The manifest of the folder if it was prepared from the same request; else None.

    Raises:
        DataError: The folder holds something that may not be replaced.
    """
    for note in job.notes:
        progress.say(note)
    if existing := _prepared_before(output, job.request):
        progress.say(f"{output}: already prepared from the same text and options; kept as it is")
        return existing
    check_replaceable(output, overwrite=overwrite)
    return None


def check_still_replaceable(request: Request, output: Path, *, overwrite: bool) -> None:
    """Looks again before a folder is put in place: another call may have made one meanwhile.

    Args:
        request: What was asked for.
        output: The folder.
        overwrite: Whether prepared data there may be replaced.

    Raises:
        DataError: The folder holds something else that may not be replaced.
    """
    if _prepared_before(output, request) is None:
        check_replaceable(output, overwrite=overwrite)


def encode(
    sources: Sources,
    writer: DatasetWriter,
    resume: Resume | None,
    save: Callable[[int], None],
    update: Callable[[int, int], None],
    *,
    save_at_once: bool = False,
) -> Skipped:
    """Encodes what is left of some text.

    Args:
        sources: The text.
        writer: Encodes and writes it; it is to be finished afterwards.
        resume: Where it goes on; None begins.
        save: Called from time to time with the number of documents that the writer has.
        update: Called with the bytes read and the tokens written so far.
        save_at_once: Whether to save before any text is encoded.

    Returns:
        What was left out.
    """
    skipped = Skipped()
    done = resume.documents if resume else 0
    saved_at = -SAVE_SECONDS if save_at_once else time.monotonic()
    for number, (split, document) in enumerate(sources.assigned(skipped)):
        if number < done:
            continue  # already encoded; reading it again is a small part of the work
        if time.monotonic() - saved_at >= SAVE_SECONDS:
            save(number)
            saved_at = time.monotonic()
        writer.add(split, document.text, document.name, document.is_last)
        update(document.bytes_read, writer.tokens)
    return skipped


def _write(
    sources: Sources,
    tokenizer: Tokenizer,
    job: Job,
    folder: Path,
    progress: Progress,
    resume: Resume | None,
) -> Manifest:
    request = job.request
    saved = (resume.splits, resume.held) if resume else (None, "")
    writer = DatasetWriter(folder, tokenizer, *saved)

    def save(number: int) -> None:
        states = writer.states()
        save_resume(folder, request, tokenizer, number, states, writer.held)

    # A trained tokenizer is saved before any text is encoded, since training takes long.
    at_once = training_wanted(request.tokenizer) is not None and not resume
    with contextlib.closing(writer):
        progress.start("encoding", sources.total_bytes)
        skipped = encode(sources, writer, resume, save, progress.update, save_at_once=at_once)
        splits = writer.finish()
        progress.finish(sources.total_bytes, writer.tokens)
    tell_cuts(writer.cut_documents, writer.forced_cuts, progress)
    return seal_folder(sources, tokenizer, job, folder, splits, skipped)


def tell_cuts(cut_documents: int, forced_cuts: int, progress: Progress) -> None:
    """Says how often text was cut where its tokens, or its documents, may be others for it.

    Args:
        cut_documents: Documents that were ended because no document can be longer.
        forced_cuts: Pieces that were cut because memory demanded it.
        progress: Receives the lines.
    """
    for count, what in (
        (cut_documents, "documents go on in another one: 2,147,483,647 tokens is the most"),
        (forced_cuts, "cuts of long documents at line ends: tokens beside them may differ"),
    ):
        if count:
            progress.say(f"{count:,} {what}")


def seal_folder(
    sources: Sources,
    tokenizer: Tokenizer,
    job: Job,
    folder: Path,
    splits: dict[SplitName, SplitInfo],
    skipped: Skipped,
) -> Manifest:
    """Writes the manifest of files that are complete, and removes what only their making needs.

    Args:
        sources: The text, of which every source has to have given some.
        tokenizer: Encoded it.
        job: What was asked for.
        folder: Where the files are.
        splits: What they hold.
        skipped: What was left out.

    Returns:
        The manifest.

    Raises:
        DataError: A source had no text.
    """
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
        request=job.request,
        tokenizer=info,
        splits=splits,
        dtype="uint16" if token_dtype(tokenizer.vocab_size)().itemsize == 2 else "int32",
        skipped_empty=skipped.empty,
        skipped_unreadable=skipped.unreadable,
        files=dict(job.files),
        left_out=dict(job.left_out),
        split_by=sources.split_by,
        fingerprint=data_fingerprint(splits, info),
    )
    remove_resume(folder)
    return manifest.write(folder)


def _prepared_before(output: Path, request: Request) -> Manifest | None:
    """Returns the manifest of existing data if it is complete and of the same request."""
    from polyad.data.text.dataset import PreparedData

    if not (output / MANIFEST_FILE).is_file():
        return None
    try:
        manifest = PreparedData.open(output).manifest
    except DataError:
        return None  # damaged: replaced with --overwrite, refused without
    return manifest if manifest.request == request else None


def summarize(manifest: Manifest, output: Path, progress: Progress) -> None:
    """Says what a folder holds and what was left out.

    Args:
        manifest: Of the folder.
        output: The folder.
        progress: Receives the lines.
    """
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
    if left := left_out_of(manifest):
        progress.say(f"left out: {left}")
    progress.say(f"prepared {output} (vocabulary of {manifest.tokenizer.vocab_size:,})")


def left_out_of(manifest: Manifest) -> str:
    """What a folder has nothing of, by reason and number; empty where that is nothing.

    Args:
        manifest: Of the folder.
    """
    counted = {
        "documents without text": manifest.skipped_empty,
        "unreadable files": manifest.skipped_unreadable,
    }
    found = {reason: count for reason, count in counted.items() if count}
    return in_words(found | manifest.left_out)
