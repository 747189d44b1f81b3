"""Prepares text: assigns documents to splits, encodes them, and writes a manifest."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from polyad.data.errors import DataError, user_path
from polyad.data.files import writing
from polyad.data.prepared import (
    MANIFEST_FILE,
    SPLITS,
    LeftOut,
    SplitName,
    digests_of,
    in_words,
    staged_folder,
)
from polyad.data.progress import Progress, Report
from polyad.data.text.dataset import PreparedData, check_replaceable, token_dtype
from polyad.data.text.documents import (
    TEXT_KEY,
    DocumentKind,
    FileFormat,
    FileSource,
    ReadOptions,
    open_source,
    open_splits,
)
from polyad.data.text.hub import DatasetSource
from polyad.data.text.manifest import (
    FORMAT_VERSION,
    Manifest,
    Request,
    SplitInfo,
    TokenizerInfo,
)
from polyad.data.text.source import EMPTY, UNREADABLE, Part, Source, Sources, documents_needed
from polyad.data.text.tokenizers.tokenizer import Tokenizer, all_cores, special_line
from polyad.data.text.tokenizers.training import resolve_tokenizer, training_wanted
from polyad.data.text.writer import DatasetWriter, SplitWriter, cut_between_words

HELD_OUT = 0.05
"""Default share of the text held out for each split that has no source of its own."""
WINDOW = 256
"""Tokens of a short window; a split of no more is of no use."""
_PART = re.compile(r"([1-9]\d{0,5})/([1-9]\d{0,5})")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to prepare, and how."""

    source: str
    """`python-stdlib`, a file, a folder, or a Hugging Face data set, whose own splits are used if
    it has them; see `polyad.data.text.documents.open_source`."""
    tokenizer: str
    """`train:VOCAB_SIZE`, `words`, `words:VOCAB_SIZE`, a path, or a name on the hub."""
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
    """Key or column of the text in `.jsonl`, `.csv` and `.parquet` files and data sets."""
    end_of_text: str | None = None
    """The token that ends each document; None for a well-known one."""
    streaming: bool = False
    """Whether Hugging Face data sets are read without a copy on disk; the result is the same."""
    documents: DocumentKind = "files"
    """What counts as a document of a text file: `files`, the whole file, or `lines`."""
    file_format: FileFormat | None = None
    """`text` reads files as text whatever their extension; None: by extension."""
    part: str | None = None
    """`K/N`: only the K-th of N shares of the documents, from 1; None for all documents."""


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
    the same request, it is kept and nothing is read.

    Args:
        source: See `PrepareConfig`.
        tokenizer: See `PrepareConfig`.
        output: The folder to make. A part is made beside it, in `part_folder`.
        overwrite: Whether prepared data in `output` may be replaced.
        report: Receives each line of progress; None writes to standard error.
        options: The other fields of `PrepareConfig`.

    Returns:
        The manifest of the folder.

    Raises:
        DataError: An argument, the text, the tokenizer or the output folder is invalid, or an
            argument has no effect for this text.
    """
    config = PrepareConfig(source=source, tokenizer=tokenizer, **options)
    output = user_path(output).resolve()
    if config.part is not None:
        output = part_folder(output, config.part)
    with contextlib.closing(Progress(report)) as progress:
        text = _open(config)
        existing = _existing(output, text, overwrite=overwrite)
        if existing is not None:
            progress.say(
                f"{output}: already prepared from the same text and options; kept as it is"
            )
            return existing
        sources = _sources(text, progress)
        with writing(output), all_cores(), staged_folder(output) as folder:
            encoder = text.tokenizer or _trained(text.request, sources, progress)
            encoder.save(folder / encoder.file_name)
            splits = _encoded(folder, sources, encoder, text.left_out, progress)
            for name, each in sources.by_split.items():
                if splits[name].documents == 0:
                    raise DataError(f"{each.spec}: no text in it (for the {name} split)")
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                request=text.request,
                tokenizer=_described(encoder),
                splits=splits,
                dtype="uint16" if token_dtype(encoder.vocab_size)().itemsize == 2 else "int32",
                files=dict(text.files),
                left_out=dict(text.left_out),
                split_by=sources.split_by,
                sha256=digests_of(folder),
            )
            manifest.write(folder)
            # Another process may have made something in the meantime.
            _existing(output, text, overwrite=overwrite)
        _report(output, manifest, progress)
        return manifest


def _described(tokenizer: Tokenizer) -> TokenizerInfo:
    return TokenizerInfo(
        fingerprint=tokenizer.fingerprint,
        file=tokenizer.file_name,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_id=tokenizer.end_of_text_id,
        begin_of_text=tokenizer.begin_of_text,
        begin_of_text_id=tokenizer.begin_of_text_id,
    )


class _Text(NamedTuple):
    """The open text of a request.

    Attributes:
        request: The request.
        by_split: The sources, by split.
        fractions: The shares held out of the first source.
        tokenizer: The given tokenizer; None if one is to be trained.
        files: Number of files read, by extension.
        left_out: How much of the text is not read, by reason.
    """

    request: Request
    by_split: dict[SplitName, Source]
    fractions: dict[SplitName, float]
    tokenizer: Tokenizer | None
    files: Mapping[str, int]
    left_out: LeftOut


def _open(config: PrepareConfig) -> _Text:
    """Opens the text, and loads the tokenizer if one is given."""
    _check_words(
        source=config.source,
        tokenizer=config.tokenizer,
        validation_source=config.validation_source,
        test_source=config.test_source,
        text_key=config.text_key,
        end_of_text=config.end_of_text,
    )
    asked: dict[SplitName, float | None] = {
        "validation": config.validation_fraction,
        "test": config.test_fraction,
    }
    fractions = _checked_fractions(
        {name: HELD_OUT if share is None else share for name, share in asked.items()}
    )
    by_split = _opened(config)
    _check_used(config, by_split, asked)
    fractions |= {name: 0.0 for name in by_split if name in fractions}
    to_train = training_wanted(config.tokenizer) is not None
    if to_train and config.part is not None:
        raise DataError(
            f"--part: {config.part} needs a tokenizer that exists, not {config.tokenizer}: prepare "
            "a sample of the text first, and name its folder with --tokenizer"
        )
    loaded = (
        None if to_train else resolve_tokenizer(config.tokenizer, end_of_text=config.end_of_text)
    )
    request = Request(
        source=config.source,
        validation_source=config.validation_source,
        test_source=config.test_source,
        tokenizer=loaded.fingerprint if loaded else config.tokenizer,
        end_of_text=config.end_of_text,
        validation_fraction=fractions["validation"],
        test_fraction=fractions["test"],
        text_key=config.text_key,
        listings={name: text.listing_digest() for name, text in by_split.items()},
        documents=_kind_of_documents(config, by_split),
        file_format=config.file_format,
        part=config.part,
    )
    files, left_out = _counted(by_split)
    return _Text(request, by_split, fractions, loaded, files, left_out)


def _opened(config: PrepareConfig) -> dict[SplitName, Source]:
    options: ReadOptions = {
        "text_key": config.text_key,
        "streaming": config.streaming,
        "documents": config.documents,
        "file_format": config.file_format,
    }
    by_split = open_splits(config.source, **options)
    held_out: dict[SplitName, str | None] = {
        "validation": config.validation_source,
        "test": config.test_source,
    }
    for name, spec in held_out.items():
        if spec is not None:
            by_split[name] = open_source(spec, split=name, **options)
    return {name: by_split[name] for name in SPLITS if name in by_split}


def _sources(text: _Text, progress: Progress) -> Sources:
    """Decides how to hold text out; this may read some lines to see if there are enough
    documents."""
    train, by_split = text.by_split["train"], text.by_split
    needed = documents_needed(text.fractions)
    part = text.request.part
    if not (isinstance(train, FileSource) and train.is_text_of_fewer_documents(needed)):
        if part is not None:
            number, parts = _part(part)
            share = Part(number - 1, parts)
            by_split = {name: source.share(share) for name, source in by_split.items()}
        return Sources(by_split, text.fractions, "documents")
    if part is not None:
        raise DataError(f"--part: {part}: {text.request.source} has too few documents for parts")
    progress.say(
        f"{text.request.source}: too few documents to divide among splits, so the text is "
        "split by position: its last parts are held out"
    )
    return Sources(by_split, text.fractions, "position")


def _trained(request: Request, sources: Sources, progress: Progress) -> Tokenizer:
    """Trains the tokenizer on the train split: held-out text must not shape the vocabulary."""
    done = 0

    def texts() -> Iterator[str]:
        nonlocal done
        train_only = sources._replace(by_split={"train": sources.by_split["train"]})
        progress.start("training the tokenizer", train_only.total_bytes)
        for split, document in train_only.assigned(LeftOut()):
            done += document.size
            progress.update(done)
            if split == "train":
                yield from cut_between_words(document.text)

    trained = resolve_tokenizer(
        request.tokenizer, end_of_text=request.end_of_text, training_texts=texts
    )
    progress.finish(done)
    return trained


def _encoded(
    folder: Path, sources: Sources, tokenizer: Tokenizer, left_out: LeftOut, progress: Progress
) -> dict[SplitName, SplitInfo]:
    """Writes the tokens of all splits into a folder."""
    progress.start("encoding", sources.total_bytes)
    with contextlib.closing(DatasetWriter(folder, tokenizer)) as writer:
        done = 0
        for split, document in sources.assigned(left_out):
            writer.add(split, document.text, document.name)
            done += document.size
            progress.update(done)
        splits = writer.finish()
        progress.finish(done, writer.tokens)
    if line := special_line(writer.special):
        progress.say(line)
    return splits


def _existing(output: Path, text: _Text, *, overwrite: bool) -> Manifest | None:
    """Reads the manifest of the output if it was prepared from the same request.

    Returns:
        The manifest; None if the output may be created or replaced.

    Raises:
        DataError: The output holds something that may not be replaced.
    """
    if (output / MANIFEST_FILE).is_file():
        # Damaged data is replaced with --overwrite, otherwise refused.
        with contextlib.suppress(DataError):
            manifest = PreparedData.open(output).manifest
            if manifest.request == text.request:
                return manifest
    check_replaceable(output, overwrite=overwrite)
    return None


def _report(output: Path, manifest: Manifest, progress: Progress) -> None:
    """Reports what the folder contains, and what was left out."""
    request = manifest.request
    total = max(1, sum(split.bytes for split in manifest.splits.values()))
    fractions = {"validation": request.validation_fraction, "test": request.test_fraction}
    for name in SPLITS:
        split = manifest.splits[name]
        share, wanted = split.bytes / total, fractions.get(name, 1)
        progress.say(
            f"{name}: {split.documents:,} documents, {split.tokens:,} tokens, {share:.1%} of the "
            "bytes"
        )
        if (wanted or split.tokens) and split.tokens <= WINDOW:
            progress.say(
                f"warning: the {name} split is too small to use: {split.tokens:,} tokens "
                f"({split.bytes:,} bytes) are not one window of {WINDOW}"
            )
        if wanted and share > 2 * wanted:
            progress.say(
                f"warning: the {name} split has {share:.1%} of the bytes where {wanted:.1%} are "
                "to be held out: a document is too large for that"
            )
    if left := in_words(manifest.left_out):
        progress.say(f"left out: {left}")
    progress.say(
        f"prepared {output} (vocabulary of {manifest.tokenizer.vocab_size:,}; "
        f"{manifest.tokenizer.in_words()})"
    )


def _part(text: str) -> tuple[int, int]:
    """Reads `K/N`."""
    match = _PART.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise DataError(f"--part: {text!r} is not allowed; K/N with K from 1 to N, as in 3/100")
    return int(match[1]), int(match[2])


def part_folder(output: Path, part: str) -> Path:
    """Returns the folder of a part, beside the folder that all parts are joined into.

    Args:
        output: That folder.
        part: `K/N`.

    Raises:
        DataError: It is not of that form.
    """
    number, parts = _part(part)
    return output.with_name(f"{output.name}.part-{number}-of-{parts}")


def join(output: str | Path, *, overwrite: bool = False, report: Report | None = None) -> Manifest:
    """Joins the parts beside a folder into it, one after the other. The parts stay.

    Args:
        output: The folder to make.
        overwrite: Whether prepared data in `output` may be replaced.
        report: Receives each line of progress; None writes to standard error.

    Returns:
        The manifest of the folder.

    Raises:
        DataError: A part is missing or damaged, or was prepared with other options than the others.
    """
    output = user_path(output).resolve()
    with contextlib.closing(Progress(report)) as progress, writing(output):
        folders = _parts_of(output)
        check_replaceable(output, overwrite=overwrite)
        parts = [_whole_part(folder, folders[0]) for folder in folders]
        first = parts[0]
        with staged_folder(output) as folder:
            tokenizer = first.tokenizer()
            tokenizer.save(folder / tokenizer.file_name)
            splits = {}
            for name in SPLITS:
                with contextlib.closing(SplitWriter(folder / name, tokenizer)) as writer:
                    for part in parts:
                        writer.copy(part.path / name, part.manifest.splits[name])
                    splits[name] = writer.finish()
            every = [part.manifest for part in parts]
            counts = sum((Counter(each.left_out) for each in every), Counter[str]())
            read = {reason: counts[reason] for reason in (EMPTY, UNREADABLE) if counts[reason]}
            manifest = every[0].model_copy(
                update={
                    "request": every[0].request.model_copy(update={"part": f"all {len(parts)}"}),
                    "splits": splits,
                    "left_out": every[0].left_out | read,
                    "sha256": digests_of(folder),
                }
            )
            manifest.write(folder)
        _report(output, manifest, progress)
        progress.say(f"joined {len(parts)} parts, which may be deleted: {folders[0]} and others")
        return manifest


def _parts_of(output: Path) -> list[Path]:
    """Lists the folders of all parts of a folder, in order."""
    name = re.compile(re.escape(output.name) + r"\.part-(\d+)-of-(\d+)")
    siblings = output.parent.iterdir() if output.parent.is_dir() else ()
    numbers = [(int(m[2]), int(m[1])) for each in siblings if (m := name.fullmatch(each.name))]
    if not numbers:
        raise DataError(
            f"--join: {output}: there are no parts beside it; make each of N with --part K/N"
        )
    counts = sorted({parts for parts, _ in numbers})
    if len(counts) > 1:
        raise DataError(
            f"--join: {output}: parts of {counts[0]} and of {counts[1]} are beside it; delete "
            "those that you do not want"
        )
    here = {number for _, number in numbers}
    for number in range(1, counts[0] + 1):
        if number not in here:
            raise DataError(f"--join: {output}: part {number}/{counts[0]} is missing")
    return [part_folder(output, f"{number}/{counts[0]}") for number in range(1, counts[0] + 1)]


def _whole_part(folder: Path, first: Path) -> PreparedData:
    """Opens a part and reads all of it, after checking that its request is that of the first."""
    part, other = (PreparedData.open(each) for each in (folder, first))
    mine, theirs = (each.manifest.request.model_dump() for each in (part, other))
    for key in mine:
        if key not in ("part", "listings") and mine[key] != theirs[key]:
            raise DataError(
                f"{folder}: was prepared with {key} {mine[key]!r:.80}, but {first.name} with "
                f"{theirs[key]!r:.80}"
            )
    part.verify()
    return part


def _counted(by_split: dict[SplitName, Source]) -> tuple[Mapping[str, int], LeftOut]:
    """Counts files that are read and what is left out."""
    files, left_out = Counter[str](), LeftOut()
    seen: list[LeftOut] = []
    for text in by_split.values():
        if isinstance(text, FileSource):
            files += text.taken()
        if isinstance(text, FileSource | DatasetSource) and text.left_out not in seen:
            seen.append(text.left_out)
            left_out.update(text.left_out)
    return files, left_out


def _check_used(
    config: PrepareConfig,
    by_split: dict[SplitName, Source],
    shares: dict[SplitName, float | None],
) -> None:
    """Refuses options that have no effect for this text."""
    for name, share in shares.items():
        if share and name in by_split:
            given = by_split[name].spec
            own = f"{given} has that split" if given == config.source else f"{given} is it"
            raise DataError(
                f"--{name}-fraction: {share} is not held out, because {own}; remove the option"
            )
    files = [text for text in by_split.values() if isinstance(text, FileSource)]
    if len(files) == len(by_split):
        if config.streaming:
            raise DataError(
                f"--streaming: applies only to Hugging Face data sets, and {config.source} is "
                "not one"
            )
        if config.text_key != TEXT_KEY and not any(each.has_keys for each in files):
            raise DataError(
                f"--text-key: {config.text_key!r} applies only to .jsonl, .csv and .parquet files "
                f"and data sets, and {config.source} has none"
            )


def _kind_of_documents(
    config: PrepareConfig, by_split: dict[SplitName, Source]
) -> Literal["files", "lines"] | None:
    """Returns what a document of a text file is; None if there are none and none is set."""
    if any(isinstance(each, FileSource) and each.has_text_files for each in by_split.values()):
        return config.documents
    if config.documents != "files":
        raise DataError(
            f"--documents: {config.documents} applies only to text files, and {config.source} has "
            "none"
        )
    if config.file_format is not None:
        raise DataError(
            f"--format: {config.file_format} applies only to files, and {config.source} is not one"
        )
    return None


def _check_words(**words: str | None) -> None:
    """Refuses empty strings, as from an unset shell variable, and what a manifest cannot hold."""
    for name, text in words.items():
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
