"""`polyad prepare` and `polyad data verify`."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from polyad.launch.command import Argument, Json, UsageError, command
from polyad.launch.output import results


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
    join: Annotated[
        bool, Argument("join DIR.part-1-of-N to DIR.part-N-of-N of text into DIR")
    ] = False,
    text: TextOptions,
) -> None:
    """Prepares text for training: .bin and .idx files of tokens, a tokenizer and manifest.json.

    Images need no preparation: data.path names their folder or data set.
    """
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    missing = [f"--{name}" for name in ("source", "tokenizer") if getattr(text, name) is None]
    if join:
        _refuse(text, besides=("output", "overwrite"), why="means nothing with --join")
    elif missing:
        raise UsageError(f"needs {' and '.join(missing)}")
    from polyad.launch.preparation import prepare_text

    prepare_text(vars(text), joins=join)


def _refuse(text: TextOptions, *, besides: tuple[str, ...], why: str) -> None:
    """Refuses options for text, except for some."""
    for field in fields(text):
        value = getattr(text, field.name)
        if field.name not in besides and value != field.default:
            name = "format" if field.name == "file_format" else field.name.replace("_", "-")
            raise UsageError(f"--{name}: {value} {why}")


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
