"""`polyad prepare` and `polyad data verify`."""

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from polyad.launch.command import Argument, Json, UsageError, command
from polyad.launch.output import only_results_on_stdout, results
from polyad.launch.preparation import PartsOptions
from polyad.train.results import aligned


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What `polyad prepare` takes of text; `accept`, `output` and `overwrite` are of images too."""

    accept: Annotated[
        bool,
        Argument(
            "prepare although something looks like a mistake, such as files that are left out, a "
            "class without images or only one class; it is said all the same"
        ),
    ] = False
    source: Annotated[
        str | None,
        Argument(
            "python-stdlib, python:PACKAGE, openwebtext, wikitext-103, hub:OWNER/NAME[:CONFIG], "
            "hub:FOLDER[:CONFIG] (a local copy), arrow:FOLDER (save_to_disk), or a .txt, .jsonl or "
            ".parquet file or folder"
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Argument(
            "train:VOCAB_SIZE, words, words:VOCAB_SIZE, characters or wordpiece:VOCAB_SIZE (of "
            "the train split), a tokenizer.json, a SentencePiece .model, BERT's vocab.txt, a "
            "folder of one or of GPT-2's files, or a name of the Hugging Face hub, such as gpt2"
        ),
    ] = None
    output: Annotated[str, Argument("the folder to make", "DIR")]
    validation_fraction: Annotated[
        float | None,
        Argument(
            "share of all documents; of few text files a part of the text; default 0.05 where "
            "the source has no such split",
            "F",
        ),
    ] = None
    test_fraction: Annotated[
        float | None,
        Argument("share for the test split, taken in the same way, with the same default", "F"),
    ] = None
    validation_source: Annotated[
        str | None, Argument("text that is the validation split, in place of a share", "SOURCE")
    ] = None
    test_source: Annotated[
        str | None, Argument("text that is the test split, in place of a share", "SOURCE")
    ] = None
    text_key: Annotated[
        str,
        Argument("key or column of the text in .jsonl and .parquet; default text", "KEY"),
    ] = "text"
    documents: Annotated[
        Literal["files", "lines"],
        Argument("what one document of a text file is: the file, or a line of it; default files"),
    ] = "files"
    file_format: Annotated[
        Literal["text"] | None,
        Argument("read files as text, whatever their names end in", flag="--format"),
    ] = None
    streaming: Annotated[bool, Argument("read a Hugging Face data set without a copy")] = False
    end_of_text: Annotated[
        str | None,
        Argument(
            "token that ends each document; default: the tokenizer's, such as <|endoftext|>",
            "TOKEN",
        ),
    ] = None
    overwrite: Annotated[bool, Argument("replace prepared data that is in DIR")] = False


@command(
    "prepare",
    "polyad prepare --source python-stdlib --tokenizer train:8192 --output runs/stdlib",
    "polyad prepare --source configs --format text --tokenizer characters --output runs/parts "
    "--parts 4 --processes 2",
    "polyad prepare --source configs --format text --tokenizer words --output runs/array "
    "--parts 100 --via slurm --time 1:00:00 --dry-run",
)
def prepare(
    *,
    images: Annotated[
        str | None,
        Argument(
            "images in place of text: digits, hub:OWNER/NAME, or a folder of classes, a .zip or "
            ".tar of one, .tar files of WebDataset, .parquet files, a folder of `datasets`, or the "
            "files of MNIST or CIFAR",
            "SOURCE",
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        Argument(
            "for --images: share of the training images that become the validation split; "
            "default: 0.01 where the data set has no validation split beside a test",
            "F",
        ),
    ] = None,
    domains: Annotated[
        bool,
        Argument(
            "for --images: SOURCE is a folder, or a .zip or .tar of one, with a folder for each "
            "domain, and in these one for each class; the held-out share is taken from each domain"
        ),
    ] = False,
    text: TextOptions,
    parts: PartsOptions,
) -> None:
    """Turns text into tokens: .bin and .idx files, a tokenizer and manifest.json."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    if images is not None:
        _refuse_text(text, parts)
        _prepare_images(images, text, held_out=held_out, domains=domains)
        return
    if held_out is not None:
        raise UsageError(f"--held-out: {held_out} means nothing without --images")
    if domains:
        raise UsageError("--domains: means nothing without --images")
    missing = [f"--{name}" for name in ("source", "tokenizer") if getattr(text, name) is None]
    if missing:
        raise UsageError(f"needs {' and '.join(missing)}, or --images for images")
    from polyad.launch.preparation import check_parts, prepare_text

    check_parts(parts)
    prepare_text(vars(text), parts)


def _refuse_text(text: TextOptions, parts: PartsOptions) -> None:
    """Refuses what is of text beside `--images`."""
    for options in (text, parts):
        for field in fields(options):
            value = getattr(options, field.name)
            if field.name in ("accept", "output", "overwrite") or value == field.default:
                continue
            name = "format" if field.name == "file_format" else field.name.replace("_", "-")
            raise UsageError(f"--{name}: {value} is of text, and is not allowed with --images")


def _prepare_images(
    source: str, options: TextOptions, *, held_out: float | None, domains: bool
) -> None:
    from polyad.data.images.prepare import prepare_images, prepared_rows

    with only_results_on_stdout() as stdout:
        started = time.monotonic()
        manifest = prepare_images(
            source,
            options.output,
            held_out=held_out,
            domains=domains,
            accept=options.accept,
            overwrite=options.overwrite,
        )
        rows = list(prepared_rows(manifest, Path(options.output), time.monotonic() - started))
        stdout.write("".join(f"{line}\n" for line in aligned(rows, "<")))


@command(
    "data verify",
    "polyad data verify runs/stdlib",
    "polyad data verify runs/stdlib --json -",
)
def data_verify(
    folders: Annotated[
        list[str],
        Argument("a folder that polyad prepare made; a mixture has several", "DIR", nargs="+"),
    ],
    *,
    json: Json = None,
) -> None:
    """Reads every byte of prepared data; exit status 2 if a file is damaged."""
    from polyad.launch.stored import verify_data

    with results(json) as show:
        result = verify_data(folders)
        show(result, result.text())
        result.check()
