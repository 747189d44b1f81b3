"""`polyad prepare` and `polyad data verify`."""

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from polyad.launch.command import Argument, Json, UsageError, command
from polyad.launch.output import only_results_on_stdout, results
from polyad.train.results import aligned


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What `polyad prepare` takes of text; `output` and `overwrite` are of images too."""

    source: Annotated[
        str | None,
        Argument(
            "text to prepare: python-stdlib, python:PACKAGE, openwebtext, wikitext-103, "
            "hub:OWNER/NAME[:CONFIG], hub:FOLDER[:CONFIG] (a local copy), arrow:FOLDER (saved "
            "with save_to_disk), or a .txt, .jsonl, .csv or .parquet file, or a folder of them"
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Argument(
            "train:VOCAB_SIZE, words or words:VOCAB_SIZE (built from the train split), a "
            "tokenizer.json, a SentencePiece .model, BERT's vocab.txt, a folder with one of these "
            "or with GPT-2's files, or a name on the Hugging Face hub, such as gpt2"
        ),
    ] = None
    output: Annotated[str, Argument("folder to create", "DIR")]
    validation_fraction: Annotated[
        float | None,
        Argument(
            "fraction of the text held out for validation, in whole documents if there are many; "
            "default 0.05 if the source has no validation split",
            "F",
        ),
    ] = None
    test_fraction: Annotated[
        float | None,
        Argument(
            "fraction held out for the test split, in the same way and with the same default", "F"
        ),
    ] = None
    validation_source: Annotated[
        str | None,
        Argument(
            "separate text for the validation split, instead of a fraction of --source", "SOURCE"
        ),
    ] = None
    test_source: Annotated[
        str | None,
        Argument("separate text for the test split, instead of a fraction of --source", "SOURCE"),
    ] = None
    text_key: Annotated[
        str,
        Argument(
            "key or column that holds the text in .jsonl, .csv and .parquet files; default text",
            "KEY",
        ),
    ] = "text"
    documents: Annotated[
        Literal["files", "lines"],
        Argument("whether a document is a whole text file or one line of it; default files"),
    ] = "files"
    file_format: Annotated[
        Literal["text"] | None,
        Argument("read files as text, whatever their extension", flag="--format"),
    ] = None
    streaming: Annotated[
        bool, Argument("stream a Hugging Face data set instead of downloading it first")
    ] = False
    end_of_text: Annotated[
        str | None,
        Argument(
            "token appended to each document; default: the tokenizer's own, such as <|endoftext|>",
            "TOKEN",
        ),
    ] = None
    part: Annotated[
        str | None,
        Argument(
            "only the K-th of N shares of the documents, into DIR.part-K-of-N; needs a tokenizer "
            "that exists",
            "K/N",
        ),
    ] = None
    overwrite: Annotated[bool, Argument("replace prepared data that is already in DIR")] = False


@command(
    "prepare",
    "polyad prepare --source python-stdlib --tokenizer train:8192 --output runs/stdlib",
    "polyad prepare --source configs --format text --tokenizer runs/stdlib --output runs/parts "
    "--part 1/2",
    "polyad prepare --source configs --format text --tokenizer runs/stdlib --output runs/parts "
    "--part 2/2",
    "polyad prepare --join --output runs/parts",
)
def prepare(
    *,
    images: Annotated[
        str | None,
        Argument(
            "prepare images instead of text; SOURCE is digits, hub:OWNER/NAME, a folder with one "
            "subfolder per class, .parquet files, a folder saved by Hugging Face datasets, or the "
            "original MNIST, CIFAR or CelebA files",
            "SOURCE",
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        Argument(
            "with --images: fraction of the training images held out for validation; default 0.01 "
            "if the data set has no validation split besides a test split",
            "F",
        ),
    ] = None,
    domains: Annotated[
        bool,
        Argument(
            "with --images: SOURCE is a folder with one subfolder per domain, each with one "
            "subfolder per class; images are held out from every domain"
        ),
    ] = False,
    join: Annotated[
        bool, Argument("join DIR.part-1-of-N to DIR.part-N-of-N of text into DIR")
    ] = False,
    text: TextOptions,
) -> None:
    """Prepares data for training: tokenizes text, or indexes images.

    Text becomes .bin and .idx files, a tokenizer and manifest.json; images get an index.
    """
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    if images is not None:
        if join:
            raise UsageError("--join: applies to text only, and is not allowed with --images")
        why = "applies to text only, and is not allowed with --images"
        _refuse(text, besides=("output", "overwrite"), why=why)
        _prepare_images(images, text, held_out=held_out, domains=domains)
        return
    if held_out is not None:
        raise UsageError(f"--held-out: {held_out} means nothing without --images")
    if domains:
        raise UsageError("--domains: means nothing without --images")
    missing = [f"--{name}" for name in ("source", "tokenizer") if getattr(text, name) is None]
    if join:
        _refuse(text, besides=("output", "overwrite"), why="means nothing with --join")
    elif missing:
        raise UsageError(f"needs {' and '.join(missing)}, or --images for images")
    from polyad.launch.preparation import prepare_text

    prepare_text(vars(text), joins=join)


def _refuse(text: TextOptions, *, besides: tuple[str, ...], why: str) -> None:
    """Refuses options for text, except for some."""
    for field in fields(text):
        value = getattr(text, field.name)
        if field.name not in besides and value != field.default:
            name = "format" if field.name == "file_format" else field.name.replace("_", "-")
            raise UsageError(f"--{name}: {value} {why}")


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
        Argument(
            "a folder created by polyad prepare; give several to check a mixture", "DIR", nargs="+"
        ),
    ],
    *,
    json: Json = None,
) -> None:
    """Verifies prepared data by reading every byte; exit status 2 if a file is damaged."""
    from polyad.launch.stored import verify_data

    with results(json) as show:
        result = verify_data(folders)
        show(result, result.text())
        result.check()
