"""`polyad prepare`, and commands that list and verify what is on disk."""

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyad.launch.command import (
    Json,
    UsageError,
    command,
    only_results_on_stdout,
    refuse_others,
    results,
)

if TYPE_CHECKING:
    from polyad.data.text.manifest import Manifest


@command(
    "prepare",
    "polyad prepare --source python-stdlib --tokenizer train:8192 --output runs/stdlib",
    "polyad prepare --source configs --format text --tokenizer runs/stdlib --output runs/parts "
    "--part 1/2",
    "polyad prepare --source configs --format text --tokenizer runs/stdlib --output runs/parts "
    "--part 2/2",
    "polyad prepare --join --output runs/parts",
)
@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Prepares text for training.

    Writes .bin and .idx files of tokens, a tokenizer and manifest.json. Images need no preparation:
    data.path names their folder or data set.

    Args:
        join: join DIR.part-1-of-N to DIR.part-N-of-N of text into DIR.
        source: text to prepare: python-stdlib, python:PACKAGE, openwebtext, wikitext-103,
            hub:OWNER/NAME[:CONFIG], hub:FOLDER[:CONFIG] (a local copy), a folder that save_to_disk
            made, or a .txt, .jsonl, .jsonl.gz, .jsonl.zst, .csv or .parquet file, or a folder of
            them.
        tokenizer: train:VOCAB_SIZE, words or words:VOCAB_SIZE (built from the train split), a
            tokenizer.json, a SentencePiece .model, BERT's vocab.txt, a folder with one of these or
            with GPT-2's files, or a name on the Hugging Face hub, such as gpt2.
        output (DIR): folder to create.
        validation_fraction (F): fraction of the text held out for validation, in whole documents
            if there are many, unless the source has a validation split; default 0.05.
        test_fraction (F): fraction held out for the test split, in the same way; default 0.05.
        validation_source (SOURCE): separate text for the validation split, instead of a fraction of
            --source.
        test_source (SOURCE): separate text for the test split, instead of a fraction of --source.
        text_key (KEY): key or column that holds the text in .jsonl, .csv and .parquet files;
            default text.
        documents: whether a document is a whole text file or one line of it; default files.
        format: read files as text, whatever their extension.
        streaming: stream a Hugging Face data set instead of downloading it first.
        end_of_text (TOKEN): token appended to each document; default: the tokenizer's own, such as
            <|endoftext|>.
        special_tokens: special tokens that are written in the text, such as <|im_start|>, are its
            characters (text), or tokens (parse), which chats need; parse also renders a column of
            messages (--text-key messages) by the tokenizer's chat template; default text.
        part (K/N): only the K-th of N shares of the documents, into DIR.part-K-of-N; needs a
            tokenizer that exists.
        overwrite: replace prepared data that is already in DIR.
    """

    join: bool = False
    source: str | None = None
    tokenizer: str | None = None
    output: str
    validation_fraction: float = 0.05
    test_fraction: float = 0.05
    validation_source: str | None = None
    test_source: str | None = None
    text_key: str = "text"
    documents: Literal["files", "lines"] = "files"
    format: Literal["text"] | None = None
    streaming: bool = False
    end_of_text: str | None = None
    special_tokens: Literal["text", "parse"] = "text"
    part: str | None = None
    overwrite: bool = False

    def run(self) -> None:
        """Prepares the data."""
        if (self.tokenizer or "").isdecimal() and not Path(str(self.tokenizer)).exists():
            raise UsageError(
                f"--tokenizer: {self.tokenizer} is a number; train:{self.tokenizer} trains a "
                "tokenizer with a vocabulary of this size"
            )
        missing = [f"--{name}" for name in ("source", "tokenizer") if not getattr(self, name)]
        if self.join:
            refuse_others(self, "--join", {"join", "output", "overwrite"})
        elif missing:
            raise UsageError(f"prepare: needs {' and '.join(missing)}")
        from polyad.data.text.manifest import PrepareConfig
        from polyad.data.text.prepare import join, part_folder, prepare

        started, folder = time.monotonic(), self.output
        with only_results_on_stdout() as stdout:
            if self.join:
                manifest = join(folder, overwrite=self.overwrite)
            else:
                options = {**vars(self), "file_format": self.format}
                config = {name: options[name] for name in PrepareConfig.model_fields}
                manifest = prepare(output=folder, overwrite=self.overwrite, **config)
                if self.part is not None:
                    folder = str(part_folder(Path(folder), self.part))
            table = prepared_table(manifest, folder, time.monotonic() - started)
            stdout.write(table + "\n")


def prepared_table(manifest: "Manifest", folder: str, seconds: float) -> str:
    """Formats prepared data by split; `seconds` is the duration of the preparation."""
    from polyad.train.results import aligned

    rows: list[tuple[str, ...]] = [("split", "documents", "tokens", "words", "bytes", "share")]
    total = sum(split.bytes for split in manifest.splits.values())
    for name, split in manifest.splits.items():
        counts = (split.documents, split.tokens, split.words, split.bytes)
        share = f"{100 * split.bytes / max(total, 1):.1f}%"
        rows.append((name, *(f"{count:,}" for count in counts), share))
    tokens = sum(split.tokens for split in manifest.splits.values())
    facts = []
    if manifest.split_by == "position":
        facts.append(
            "split by position, for there are few documents: the last parts of the text are held "
            "out; --validation-source and --test-source name others"
        )
    if manifest.left_out:
        left = "; ".join(f"{reason}: {count:,}" for reason, count in manifest.left_out.items())
        facts.append(f"left out: {left}")
    if special := manifest.special_tokens:
        words = ", ".join(f"{token} {count:,}" for token, count in islice(special.items(), 5))
        others = f" and {len(special) - 5} others" if len(special) > 5 else ""
        as_text = "characters; --special-tokens parse reads them as tokens"
        read_as = "tokens" if manifest.request.special_tokens == "parse" else as_text
        facts.append(f"special tokens in the text: {words}{others}: read as {read_as}")
    facts.append(manifest.tokenizer.in_words())
    wanted = manifest.request.tokenizer.partition(":")[2]
    if wanted.isdecimal() and manifest.tokenizer.vocab_size < int(wanted):
        facts.append(f"the text has too few words for a vocabulary of {int(wanted):,}")
    return "\n".join(
        [
            *aligned(rows),
            *facts,
            f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s, "
            f"vocabulary {manifest.tokenizer.vocab_size:,}",
            f"in {folder}",
        ]
    )


@command(
    "data verify",
    "polyad data verify runs/stdlib",
    "polyad data verify runs/stdlib --json -",
)
def data_verify(folders: list[str], *, json: Json = None) -> None:
    """Verifies prepared data byte by byte; exit status 2 if damaged.

    Args:
        folders (DIR): a folder created by polyad prepare; give several to check a mixture.
    """
    from polyad.launch.stored import check_data, data_text, verify_data

    with results(json) as show:
        result = verify_data(folders)
        show(result, data_text(result))
        check_data(result)


@command("checkpoint list", "polyad checkpoint list runs/quickstart/run")
def checkpoint_list(folder: Path, *, json: Json = None) -> None:
    """Lists the checkpoints of a run with step and size, and marks damaged ones.

    Args:
        folder (FOLDER): a run, its checkpoints folder, or one checkpoint.
    """
    from polyad.launch.stored import checkpoints_text, list_checkpoints

    with results(json) as show:
        result = list_checkpoints(folder)
        show(result, checkpoints_text(result))


@command(
    "checkpoint verify",
    "polyad checkpoint verify runs/quickstart/run --json -",
    "polyad checkpoint verify runs/quickstart/run/checkpoints/step-00000100",
)
def checkpoint_verify(folder: Path, *, json: Json = None) -> int:
    """Verifies checkpoints by reading every byte; exit status 2 if one is damaged.

    Args:
        folder (FOLDER): a run, its checkpoints folder, or one checkpoint.
    """
    from polyad.launch.stored import checkpoints_text, verify_checkpoints

    with results(json) as show:
        result = verify_checkpoints(folder)
        show(result, checkpoints_text(result))
    return 0 if result["good"] else 2
