"""Prepares text: assigns documents to splits, encodes them, and writes a manifest.

Documents are assigned one by one, or by position if there are few; shares are of bytes.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError
from tqdm import tqdm

from polyad.data.errors import DataError, user_path
from polyad.data.files import staged_folder, writing
from polyad.data.tables import SPLITS, SplitName
from polyad.data.text.dataset import PreparedData, check_replaceable, token_dtype
from polyad.data.text.manifest import (
    FORMAT_VERSION,
    HELD_OUT,
    Manifest,
    PrepareConfig,
    TokenizerInfo,
    digests_of,
)
from polyad.data.text.sources import EMPTY, UNREADABLE, Document, Source, open_splits
from polyad.data.text.tokenizers.files import chat_renderer, load_tokenizer, trainer_of
from polyad.data.text.tokenizers.tokenizer import END_OF_TEXT
from polyad.data.text.writer import SplitWriter, cut_between_words, write_documents

MOST_SLACK = 4096
"""Characters after a border in which a line end, or white space, is searched for."""

_WHITE_SPACE = re.compile(r"\s")


class Sources(NamedTuple):
    """The text by its initial split, and the shares held out of the first source.

    Attributes:
        by_split: A source for each split.
        fractions: The shares to hold out.
        split_by: How they are held out.
    """

    by_split: dict[SplitName, Source]
    fractions: dict[SplitName, float]
    split_by: Literal["documents", "position"]

    def assigned(self, left_out: Counter[str]) -> Iterator[tuple[SplitName, Document]]:
        """Reads all sources, each document with its split.

        Args:
            left_out: Counts what is left out of the text.
        """
        for name, source in self.by_split.items():
            documents = source.documents(left_out)
            if name != "train":
                yield from ((name, document) for document in documents)
            elif self.split_by == "position":
                yield from split_by_position(list(documents), self.fractions)
            else:
                yield from split_by_bytes(documents, self.fractions)


def split_by_bytes(
    documents: Iterable[Document], fractions: dict[SplitName, float]
) -> Iterator[tuple[SplitName, Document]]:
    """Holds documents out by shares of the bytes of all so far.

    A held-out split that has less than its fraction takes the next document of at most twice the
    mean size, and any document that brings its share closer to the fraction. So each split keeps
    its fraction within about a document of usual size, and does not prefer small documents to usual
    ones. Until there are `documents_needed`, no mean is known, and the second rule holds alone.

    Args:
        documents: The documents.
        fractions: The fraction of all bytes for each held-out split; train takes the others.

    Yields:
        Each document and its split.
    """
    needed, total = documents_needed(fractions), 0
    held = dict.fromkeys(fractions, 0)
    for number, document in enumerate(documents, start=1):
        size = document.size
        total += size
        is_usual = number >= needed and size * number <= 2 * total
        split: SplitName = "train"
        for name, fraction in fractions.items():
            goal = fraction * total
            # The second: |held + size - goal| < |held - goal|.
            if (is_usual and held[name] < goal) or held[name] + size / 2 < goal:
                held[name] += size
                split = name
                break
        yield split, document


def documents_needed(fractions: dict[SplitName, float]) -> int:
    """Returns the number of documents needed to assign them one by one.

    Returns:
        The number at which one document is at most the smallest share; 1 if nothing is held out.
    """
    held_out = [fraction for fraction in fractions.values() if fraction > 0]
    return math.ceil(1 / min(held_out) - 1e-6) if held_out else 1


def split_by_position(
    documents: Sequence[Document], fractions: dict[SplitName, float]
) -> Iterator[tuple[SplitName, Document]]:
    """Lays a few documents end to end and holds the last parts out.

    A border is after the first line end at or behind its nominal place, else before white space,
    both within a tenth of the smallest share and `MOST_SLACK` characters; else at the nominal
    place. A document that it cuts becomes one document on either side.

    Yields:
        Each document or part of one, and its split.
    """
    held_out = {name: share for name, share in fractions.items() if share > 0}
    total = sum(document.size for document in documents)
    borders: list[tuple[float, SplitName]] = []
    before = 1 - sum(held_out.values())
    for name, share in held_out.items():
        borders.append((before * total, name))
        before += share
    slack = min(MOST_SLACK, int(min(held_out.values(), default=0) * total / 10))
    split: SplitName = "train"
    start = 0
    for document in documents:
        text, stop = document.text, start + document.size
        while borders and stop > borders[0][0]:
            border, following = borders.pop(0)
            place = _border(text, max(0, math.ceil(border) - start), slack)
            if head := text[:place]:
                yield split, document._replace(text=head)
            start += len(head.encode())
            text, split = text[place:], following
        if text:
            yield split, document._replace(text=text)
        start = stop


def _border(text: str, offset: int, slack: int) -> int:
    """Finds the character position of a border near a byte offset."""
    place = len(text.encode()[:offset].decode(errors="ignore"))
    line_end = text.find("\n", max(0, place - 1), place + slack)
    if line_end >= 0:
        return line_end + 1
    space = _WHITE_SPACE.search(text, place, place + slack)
    return space.start() if space else place


def prepare(
    source: str,
    tokenizer: str,
    output: str | Path,
    *,
    overwrite: bool = False,
    **options: Any,
) -> Manifest:
    """Turns text into a folder that training reads.

    The text is streamed once, and once before that to train a tokenizer (on the documents of the
    train split only). The folder appears complete or not at all.

    Args:
        source: See `PrepareConfig`.
        tokenizer: See `PrepareConfig`.
        output: The folder to make. A part is made beside it, in `part_folder`.
        overwrite: Whether prepared data in `output` may be replaced.
        options: The other fields of `PrepareConfig`.

    Returns:
        The manifest of the folder.

    Raises:
        DataError: An argument, the text, the tokenizer or the output folder is invalid.
    """
    config = _config(source=source, tokenizer=tokenizer, **options)
    output = user_path(output).resolve()
    if config.part is not None:
        output = part_folder(output, config.part)
    check_replaceable(output, overwrite=overwrite)
    trainer, parses = trainer_of(config.tokenizer), config.special_tokens == "parse"
    by_split = _opened(config, chat_renderer(config.tokenizer) if parses else None)
    if trainer is None:
        encoder = load_tokenizer(config.tokenizer, config.end_of_text)
        encoder = encoder.parsing() if parses else encoder
    elif parses:
        raise DataError(
            f"--special-tokens: parse needs a tokenizer that exists, not {config.tokenizer}"
        )
    elif config.part is not None:
        raise DataError(
            f"--part: {config.part} needs a tokenizer that exists, not {config.tokenizer}: prepare "
            "a sample of the text first, and name its folder with --tokenizer"
        )
    sources = _sources(config, by_split)
    left_out = Counter[str]()
    for each in {id(each.left_out): each for each in by_split.values()}.values():
        left_out.update(each.left_out)
    with writing(output), staged_folder(output) as folder:
        if trainer is not None:
            encoder = trainer(_training_texts(sources), config.end_of_text or END_OF_TEXT)
        encoder.save(folder / encoder.file)
        special = Counter[str]()
        splits = write_documents(folder, encoder, _read(sources, left_out, "encoding"), special)
        for split, each in sources.by_split.items():
            if splits[split].documents == 0:
                raise DataError(f"{each.spec}: no text in it (for the {split} split)")
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            request=config,
            tokenizer=TokenizerInfo.model_validate(encoder, from_attributes=True),
            splits=splits,
            dtype="uint16" if token_dtype(encoder.vocab_size)().itemsize == 2 else "int32",
            left_out=dict(left_out),
            special_tokens=dict(special.most_common()),
            split_by=sources.split_by,
            sha256=digests_of(folder),
        )
        manifest.write(folder)
        # Another process may have made something in the meantime.
        check_replaceable(output, overwrite=overwrite)
    return manifest


def _config(**options: Any) -> PrepareConfig:
    try:
        return PrepareConfig(**options)
    except ValidationError as error:
        first = error.errors()[0]
        option = f"--{first['loc'][0]}".replace("_", "-").replace("file-format", "format")
        raise DataError(f"{option}: {first['input']!r} is not allowed: {first['msg']}") from None


def _opened(config: PrepareConfig, render: Callable[[Any], str] | None) -> dict[SplitName, Source]:
    by_split = open_splits(config.source, config, render)
    held_out: dict[SplitName, str | None] = {
        "validation": config.validation_source,
        "test": config.test_source,
    }
    for name, spec in held_out.items():
        if spec is not None:
            splits = open_splits(spec, config, render)
            by_split[name] = splits.get(name) or splits["train"]
    return {name: by_split[name] for name in SPLITS if name in by_split}


def _sources(config: PrepareConfig, by_split: dict[SplitName, Source]) -> Sources:
    """Decides how to hold text out; this may read some documents to see if there are enough."""
    shares: dict[SplitName, float] = {
        "validation": config.validation_fraction,
        "test": config.test_fraction,
    }
    for name in shares.keys() & by_split.keys():
        if shares[name] not in (0, HELD_OUT):
            raise DataError(
                f"--{name}-fraction: {shares[name]} is not held out, because "
                f"{by_split[name].spec} is that split; remove the option"
            )
    fractions = {name: 0.0 if name in by_split else share for name, share in shares.items()}
    needed = documents_needed(fractions)
    is_short = sum(1 for _ in islice(by_split["train"].documents(), needed)) < needed
    if config.part is not None:
        if is_short:
            raise DataError(
                f"--part: {config.part}: {config.source} has too few documents for parts"
            )
        number, parts = _part(config.part)
        by_split = {name: source.share(number - 1, parts) for name, source in by_split.items()}
    return Sources(by_split, fractions, "position" if is_short else "documents")


def _read(
    sources: Sources, left_out: Counter[str], what: str
) -> Iterator[tuple[SplitName, Document]]:
    """Reads all documents, each with its split, with a bar on a terminal."""
    total = sum(source.total_bytes for source in sources.by_split.values()) or None
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None) as bar:
        for split, document in sources.assigned(left_out):
            yield split, document
            bar.update(document.size)


def _training_texts(sources: Sources) -> Iterator[str]:
    """Reads the train split alone: held-out text must not shape the vocabulary."""
    train_only = sources._replace(by_split={"train": sources.by_split["train"]})
    for split, document in _read(train_only, Counter(), "training the tokenizer"):
        if split == "train":
            yield from cut_between_words(document.text)


def _part(text: str) -> tuple[int, int]:
    """Reads `K/N`."""
    number, parts = map(int, text.split("/"))
    if number > parts:
        raise DataError(f"--part: {text!r} is not allowed; K/N with K from 1 to N, as in 3/100")
    return number, parts


def part_folder(output: Path, part: str) -> Path:
    """Returns the folder of a part, beside the folder that all parts are joined into.

    Args:
        output: That folder.
        part: `K/N`.

    Raises:
        DataError: K is above N.
    """
    number, parts = _part(part)
    return output.with_name(f"{output.name}.part-{number}-of-{parts}")


def join(output: str | Path, *, overwrite: bool = False) -> Manifest:
    """Joins the parts beside a folder into it, one after the other. The parts stay.

    Args:
        output: The folder to make.
        overwrite: Whether prepared data in `output` may be replaced.

    Returns:
        The manifest of the folder.

    Raises:
        DataError: A part is missing or damaged, or was prepared with other options than the others.
    """
    output = user_path(output).resolve()
    folders = _parts_of(output)
    check_replaceable(output, overwrite=overwrite)
    parts = [_whole_part(folder, folders[0]) for folder in folders]
    tokenizer, manifests = parts[0].tokenizer(), [part.manifest for part in parts]
    counts = sum((Counter(each.left_out) for each in manifests), Counter[str]())
    special = sum((Counter(each.special_tokens) for each in manifests), Counter[str]())
    read = {reason: counts[reason] for reason in (EMPTY, UNREADABLE) if counts[reason]}
    with writing(output), staged_folder(output) as folder:
        tokenizer.save(folder / tokenizer.file)
        writers = {name: SplitWriter(folder / name, tokenizer) for name in SPLITS}
        for part in parts:
            for name, writer in writers.items():
                writer.copy(part.path / name, part.manifest.splits[name])
        splits = {name: writer.finish() for name, writer in writers.items()}
        manifest = manifests[0].model_copy(
            update={
                "request": manifests[0].request.model_copy(update={"part": None}),
                "splits": splits,
                "left_out": manifests[0].left_out | read,
                "special_tokens": dict(special.most_common()),
                "sha256": digests_of(folder),
            }
        )
        manifest.write(folder)
    return manifest


def _parts_of(output: Path) -> list[Path]:
    """Lists the folders of all parts of a folder, in order."""
    name = re.compile(re.escape(output.name) + r"\.part-(\d+)-of-(\d+)")
    siblings = output.parent.iterdir() if output.parent.is_dir() else ()
    numbers = {(int(m[2]), int(m[1])) for each in siblings if (m := name.fullmatch(each.name))}
    count = max(numbers)[0] if numbers else 0
    if numbers != {(count, number + 1) for number in range(count)} or not numbers:
        there = ", ".join(f"{number}/{parts}" for parts, number in sorted(numbers)) or "none"
        needed = f"all of {count} parts" if count else "parts"
        raise DataError(f"--join: {output}: needs {needed} beside it, and there are: {there}")
    return [part_folder(output, f"{number}/{count}") for _, number in sorted(numbers)]


def _whole_part(folder: Path, first: Path) -> PreparedData:
    """Opens a part and reads all of it, after checking that its request is that of the first."""
    part, other = (PreparedData.open(each) for each in (folder, first))
    mine, theirs = (each.manifest.request.model_dump(exclude={"part"}) for each in (part, other))
    key = next((key for key in mine if mine[key] != theirs[key]), None)
    if key is not None or part.manifest.tokenizer != other.manifest.tokenizer:
        raise DataError(f"{folder}: was prepared with another {key or 'tokenizer'} than {first}")
    part.verify()
    return part
