"""Prepares text: assigns documents to splits, encodes them, and writes a manifest."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError, user_path
from polyad.data.files import writing
from polyad.data.prepared import (
    MANIFEST_FILE,
    SPLITS,
    LeftOut,
    SplitName,
    digests_of,
    staged_folder,
)
from polyad.data.progress import Progress, Report
from polyad.data.text.dataset import PreparedData, check_replaceable, token_dtype
from polyad.data.text.manifest import (
    FORMAT_VERSION,
    Manifest,
    Request,
    SplitInfo,
    TokenizerInfo,
)
from polyad.data.text.readers import LINES, TEXT
from polyad.data.text.sources import (
    EMPTY,
    UNREADABLE,
    Document,
    Part,
    ReadOptions,
    Source,
    open_source,
    open_splits,
)
from polyad.data.text.splits import Sources, documents_needed
from polyad.data.text.tokenizers.tokenizer import Tokenizer, all_cores, special_line
from polyad.data.text.tokenizers.training import resolve_tokenizer, training_wanted
from polyad.data.text.writer import SplitWriter, cut_between_words, write_documents

HELD_OUT = 0.05
"""Default share of the text held out for each split that has no source of its own."""
WINDOW = 256
"""Tokens of a short window; a split of no more is of no use."""
_PART = re.compile(r"([1-9]\d{0,5})/([1-9]\d{0,5})")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(ReadOptions):
    """What to prepare, and how."""

    source: str
    """`python-stdlib`, a file, a folder, or a Hugging Face data set, whose own splits are used if
    it has them; see `polyad.data.text.sources.open_splits`."""
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
    end_of_text: str | None = None
    """The token that ends each document; None for a well-known one."""
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
    for name, text in vars(config).items():
        if text == "" or (isinstance(text, str) and not _is_utf_8(text)):
            option = f"--{name.replace('_', '-')}"
            raise DataError(f"{option}: {text!r} is not allowed; text in UTF-8, and not empty")
    output = user_path(output).resolve()
    if config.part is not None:
        output = part_folder(output, config.part)
    with contextlib.closing(Progress(report)) as progress:
        by_split = _opened(config)
        loaded = _loaded_tokenizer(config)
        request = _request(config, by_split, loaded)
        existing = _existing(output, request, overwrite=overwrite)
        if existing is not None:
            progress.say(
                f"{output}: already prepared from the same text and options; kept as it is"
            )
            return existing
        sources = _sources(request, by_split, progress)
        files, left_out = Counter[str](), LeftOut()
        for each in {id(each.left_out): each for each in by_split.values()}.values():
            left_out.update(each.left_out)
        for each in by_split.values():
            files += each.endings()
        with writing(output), all_cores(), staged_folder(output) as folder:
            encoder = loaded or _trained(request, sources, progress)
            encoder.save(folder / encoder.file_name)
            splits = _encoded(folder, sources, encoder, left_out, progress)
            for split, each in sources.by_split.items():
                if splits[split].documents == 0:
                    raise DataError(f"{each.spec}: no text in it (for the {split} split)")
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                request=request,
                tokenizer=TokenizerInfo(
                    fingerprint=encoder.fingerprint,
                    file=encoder.file_name,
                    vocab_size=encoder.vocab_size,
                    end_of_text=encoder.end_of_text,
                    end_of_text_id=encoder.end_of_text_id,
                    begin_of_text=encoder.begin_of_text,
                    begin_of_text_id=encoder.begin_of_text_id,
                ),
                splits=splits,
                dtype="uint16" if token_dtype(encoder.vocab_size)().itemsize == 2 else "int32",
                files=dict(files),
                left_out=dict(left_out),
                split_by=sources.split_by,
                sha256=digests_of(folder),
            )
            manifest.write(folder)
            # Another process may have made something in the meantime.
            _existing(output, request, overwrite=overwrite)
        _warn(manifest, progress)
        return manifest


def _is_utf_8(text: str) -> bool:
    """Returns whether a manifest can hold a text: an argument of a command may be any bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _opened(config: PrepareConfig) -> dict[SplitName, Source]:
    by_split = open_splits(config.source, config)
    held_out: dict[SplitName, str | None] = {
        "validation": config.validation_source,
        "test": config.test_source,
    }
    for name, spec in held_out.items():
        if spec is not None:
            by_split[name] = open_source(spec, config, split=name)
    _check_used(config, by_split)
    return {name: by_split[name] for name in SPLITS if name in by_split}


def _check_used(config: PrepareConfig, by_split: dict[SplitName, Source]) -> None:
    """Refuses options that have no effect on this text."""
    formats = {file.format for source in by_split.values() for file in source.files}
    has_text_files = any(source.has_text_files for source in by_split.values())
    unused = {
        "--streaming": config.streaming and None not in formats,
        "--text-key": config.text_key != ReadOptions.text_key and formats <= {TEXT, LINES},
        "--documents": config.documents != "files" and not has_text_files,
        "--format": config.file_format is not None and formats <= {None},
    }
    for option, is_unused in unused.items():
        if is_unused:
            raise DataError(f"{option}: has no effect on {config.source}; remove the option")


def _loaded_tokenizer(config: PrepareConfig) -> Tokenizer | None:
    """Loads the tokenizer; None if it is to be trained."""
    if training_wanted(config.tokenizer) is None:
        return resolve_tokenizer(config.tokenizer, end_of_text=config.end_of_text)
    if config.part is not None:
        raise DataError(
            f"--part: {config.part} needs a tokenizer that exists, not {config.tokenizer}: prepare "
            "a sample of the text first, and name its folder with --tokenizer"
        )
    return None


_AS_ASKED = (
    "source", "validation_source", "test_source", "end_of_text", "text_key", "file_format", "part"
)  # fmt: skip
"""Fields of a request that are those of `PrepareConfig`."""


def _request(
    config: PrepareConfig, by_split: dict[SplitName, Source], loaded: Tokenizer | None
) -> Request:
    fractions = _fractions(config, by_split)
    has_text_files = any(each.has_text_files for each in by_split.values())
    return Request(
        **{name: getattr(config, name) for name in _AS_ASKED},
        tokenizer=loaded.fingerprint if loaded else config.tokenizer,
        validation_fraction=fractions["validation"],
        test_fraction=fractions["test"],
        listings={name: text.listing_digest() for name, text in by_split.items()},
        documents=config.documents if has_text_files else None,
    )


def _fractions(config: PrepareConfig, by_split: dict[SplitName, Source]) -> dict[SplitName, float]:
    """Returns the shares to hold out; 0 of a split that has a source of its own."""
    shares: dict[SplitName, float | None] = {
        "validation": config.validation_fraction,
        "test": config.test_fraction,
    }
    fractions: dict[SplitName, float] = {}
    for name, share in shares.items():
        if not 0 <= (share or 0) < 1:
            raise DataError(
                f"--{name}-fraction: {share} is not allowed; it must be at least 0 and below 1"
            )
        if share and name in by_split:
            raise DataError(
                f"--{name}-fraction: {share} is not held out, because {by_split[name].spec} is "
                "that split; remove the option"
            )
        fractions[name] = 0.0 if name in by_split else HELD_OUT if share is None else share
    if sum(fractions.values()) >= 1:
        both = " + ".join(str(fraction) for fraction in fractions.values())
        raise DataError(
            f"--validation-fraction and --test-fraction: {both} leaves nothing to train on"
        )
    return fractions


def _sources(request: Request, by_split: dict[SplitName, Source], progress: Progress) -> Sources:
    """Decides how to hold text out; this may read some documents to see if there are enough."""
    fractions: dict[SplitName, float] = {
        "validation": request.validation_fraction,
        "test": request.test_fraction,
    }
    is_short = by_split["train"].is_text_of_fewer_documents(documents_needed(fractions))
    if request.part is not None:
        if is_short:
            raise DataError(
                f"--part: {request.part}: {request.source} has too few documents for parts"
            )
        number, parts = _part(request.part)
        share = Part(number - 1, parts)
        by_split = {name: source.share(share) for name, source in by_split.items()}
    if is_short:
        progress.say(
            f"{request.source}: too few documents to divide among splits, so the text is "
            "split by position: its last parts are held out"
        )
    return Sources(by_split, fractions, "position" if is_short else "documents")


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
    done = 0

    def documents() -> Iterator[tuple[SplitName, Document]]:
        nonlocal done
        for split, document in sources.assigned(left_out):
            yield split, document
            done += document.size
            progress.update(done)

    splits, special = write_documents(folder, tokenizer, documents())
    progress.finish(done, sum(split.tokens for split in splits.values()))
    if line := special_line(special):
        progress.say(line)
    return splits


def _existing(output: Path, request: Request, *, overwrite: bool) -> Manifest | None:
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
            if manifest.request == request:
                return manifest
    check_replaceable(output, overwrite=overwrite)
    return None


def _warn(manifest: Manifest, progress: Progress) -> None:
    """Warns of splits that are too small to use, or far larger than their share."""
    request = manifest.request
    total = max(1, sum(split.bytes for split in manifest.splits.values()))
    fractions = {"validation": request.validation_fraction, "test": request.test_fraction}
    for name in SPLITS:
        split = manifest.splits[name]
        share, wanted = split.bytes / total, fractions.get(name, 1)
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
        _warn(manifest, progress)
        progress.say(f"joined {len(parts)} parts, which may be deleted: {folders[0]} and others")
        return manifest


def _parts_of(output: Path) -> list[Path]:
    """Lists the folders of all parts of a folder, in order."""
    name = re.compile(re.escape(output.name) + r"\.part-(\d+)-of-(\d+)")
    siblings = output.parent.iterdir() if output.parent.is_dir() else ()
    numbers = {(int(m[2]), int(m[1])) for each in siblings if (m := name.fullmatch(each.name))}
    counts = sorted({parts for parts, _ in numbers})
    if not counts:
        raise DataError(
            f"--join: {output}: there are no parts beside it; make each of N with --part K/N"
        )
    if len(counts) > 1:
        raise DataError(
            f"--join: {output}: parts of {counts[0]} and of {counts[1]} are beside it; delete "
            "those that you do not want"
        )
    wanted = range(1, counts[0] + 1)
    if missing := [number for number in wanted if (counts[0], number) not in numbers]:
        raise DataError(f"--join: {output}: part {missing[0]}/{counts[0]} is missing")
    return [part_folder(output, f"{number}/{counts[0]}") for number in wanted]


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
