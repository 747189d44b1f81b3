"""`polyad prepare` for text."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyad.launch.output import align, only_results_on_stdout

if TYPE_CHECKING:
    from polyad.data.text.manifest import Manifest


def prepare_text(options: dict[str, Any], *, joins: bool) -> None:
    """Prepares text, or a part of it, or joins the parts.

    Args:
        options: the options for text.
        joins: whether to join the parts beside the folder.
    """
    from polyad.data.text.manifest import PrepareConfig
    from polyad.data.text.prepare import join, part_folder, prepare

    started = time.monotonic()
    output, overwrite = options["output"], options["overwrite"]
    with only_results_on_stdout() as stdout:
        if joins:
            manifest = join(output, overwrite=overwrite)
        else:
            config = {name: options[name] for name in PrepareConfig.model_fields}
            manifest = prepare(output=output, overwrite=overwrite, **config)
            if options["part"] is not None:
                output = part_folder(Path(output), options["part"])
        stdout.write(prepared_table(manifest, output, time.monotonic() - started) + "\n")


def prepared_table(manifest: "Manifest", folder: str, seconds: float) -> str:
    """Formats prepared data by split; `seconds` is the duration of the preparation."""
    rows: list[tuple[str, ...]] = [("split", "documents", "tokens", "words", "bytes", "share")]
    total = sum(split.bytes for split in manifest.splits.values())
    for name, split in manifest.splits.items():
        counts = (split.documents, split.tokens, split.words, split.bytes)
        share = f"{100 * split.bytes / max(total, 1):.1f}%"
        rows.append((name, *(f"{count:,}" for count in counts), share))
    tokens = sum(split.tokens for split in manifest.splits.values())
    facts = []
    if manifest.split_by == "position":
        facts.append("split by position: the last parts of the text are held out")
    if manifest.left_out:
        left = "; ".join(f"{reason}: {count:,}" for reason, count in manifest.left_out.items())
        facts.append(f"left out: {left}")
    facts.append(manifest.tokenizer.in_words())
    return "\n".join(
        [
            align(rows),
            *facts,
            f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s, "
            f"vocabulary {manifest.tokenizer.vocab_size:,}",
            f"in {folder}",
        ]
    )
