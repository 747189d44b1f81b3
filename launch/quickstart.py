"""`make quickstart`: text to perplexity, with a table at the end; see `launch/journey.py`."""

import sys
from pathlib import Path
from typing import Any

from polyad.launch.ending import guard
from polyad.launch.journey import Journey, model_rows, run_rows
from polyad.launch.signals import stop_at_signals

CONFIG = Path("configs/quickstart/gpt2-smoe.yaml")
FOLDER = Path("runs/quickstart")
VOCAB_SIZE = 8192


class TextJourney(Journey):
    """Python's standard library to a GPT-2, beside a unigram model."""

    prepares = "Python's standard library -> a byte-level BPE -> tokens"
    trains = "a GPT-2"
    compares = "compare with a unigram model on the same tokens"

    def prepare_arguments(self) -> list[str]:
        """See `Journey.prepare_arguments`; the text depends on the version of Python."""
        return [
            *("--source", "python-stdlib", "--tokenizer", f"train:{VOCAB_SIZE}"),
            *("--output", str(self.data), "--validation-fraction", "0.02"),
            *("--test-fraction", "0.02", "--overwrite"),
        ]

    def finish(self, result: dict[str, Any], half: int) -> list[tuple[str, str]]:
        """See `Journey.finish`."""
        return summary(self.run, self.data, result, half)


def summary(run: Path, data: Path, result: dict[str, Any], half: int) -> list[tuple[str, str]]:
    """What the quickstart shows.

    Args:
        run: the run's folder.
        data: its prepared data.
        result: what `polyad evaluate` wrote.
        half: the step it went on from.

    Returns:
        Names and values.
    """
    from polyad.data.text.dataset import PreparedData
    from polyad.train.evaluation.baselines import unigram_perplexity

    prepared = PreparedData.open(data)
    unigram = unigram_perplexity(
        prepared.split("train"),
        prepared.split("validation"),
        prepared.manifest.tokenizer.vocab_size,
    )
    return [
        *model_rows(run, "token"),
        (
            "perplexity",
            f"{result['perplexity']:.1f} on {result['tokens_scored']:,} held-out tokens",
        ),
        ("of a unigram model", f"{unigram:.1f} on the same tokens"),
        ("bits per byte", f"{result['bits_per_byte']:.3f}"),
        *run_rows(run, half, "token"),
    ]


if __name__ == "__main__":
    stop_at_signals()
    sys.exit(guard(TextJourney(CONFIG, FOLDER).main))
