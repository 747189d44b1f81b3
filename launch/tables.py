"""Tables that commands print when they succeed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyad.launch.output import align

if TYPE_CHECKING:
    from polyad.data.text.manifest import Manifest
    from polyad.train.state import TrainState


def prepared_table(manifest: "Manifest", folder: str, seconds: float) -> str:
    """A table of prepared data, by split.

    Args:
        manifest: what was prepared.
        folder: where it is.
        seconds: duration of the preparation.

    Returns:
        A few lines.
    """
    from polyad.data.text.prepare import left_out_of

    rows: list[tuple[str, ...]] = [("split", "documents", "tokens", "words", "bytes")]
    for name, split in manifest.splits.items():
        counts = (split.documents, split.tokens, split.words, split.bytes)
        rows.append((name, *(f"{count:,}" for count in counts)))
    tokens = sum(split.tokens for split in manifest.splits.values())
    facts = []
    if manifest.split_by == "position":
        facts.append("split by position: the last parts of the text are held out")
    if manifest.files:
        files = (f"{count:,} {ending}" for ending, count in manifest.files.items())
        facts.append(f"files read: {', '.join(files)}")
    if left := left_out_of(manifest):
        facts.append(f"left out: {left}")
    return "\n".join(
        [
            align(rows),
            *facts,
            f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s, "
            f"vocabulary {manifest.tokenizer.vocab_size:,}",
            f"in {folder}",
        ]
    )


def trained_table(state: "TrainState", config: Path, overrides: Sequence[str]) -> str:
    """The line at the end of a run: its state.

    Args:
        state: of training.
        config: the run's file.
        overrides: `key=value`.

    Returns:
        A line.
    """
    from polyad.train.config.run import load_config
    from polyad.train.records import METRICS_FILE

    folder = Path(load_config(config, overrides).run.folder)
    skipped = f", {state.skipped_steps:,} of them skipped" if state.skipped_steps else ""
    last = _last_loss(folder / METRICS_FILE)
    return f"{state.step:,} steps done{skipped}; {last}in {folder}"


def _last_loss(metrics: Path) -> str:
    from polyad.train.records import records_of

    records = list(records_of(metrics)) if metrics.exists() else []
    loss = records[-1]["loss"] if records else None
    return "" if loss is None else f"last loss {loss:.4f}; "
