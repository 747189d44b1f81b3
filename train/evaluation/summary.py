"""A run in a few lines, text beside a unigram model: the end of `configs/quickstart/run.sh`.

    polyad evaluate RUN --json SCORES
    python -m polyad.train.evaluation.summary RUN SCORES

Shapes: V vocabulary.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from polyad.data.text.dataset import PreparedData, TokenStream
from polyad.model.build import count_parameters
from polyad.train.config.adaptation import model_of, unused_parameters
from polyad.train.config.run import load_config
from polyad.train.experts.token_classes import frequencies
from polyad.train.loop.metrics import last_loss, median_rate, peak_memory, read_records
from polyad.train.results import aligned
from polyad.train.tasks.registry import TASKS


def summary(run: Path, scores: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values: the model, its losses, scores, routing and speed.

    Args:
        run: a run's folder.
        scores: what `polyad evaluate --json` wrote about it.
    """
    records, config = read_records(run), load_config(run / "config.yaml")
    model, unit = model_of(config), TASKS[config.data.kind].unit.name
    parameters = count_parameters(model)
    active = parameters - unused_parameters(model)
    losses = records[0]["loss"], last_loss(records)
    processes = json.loads((run / "environment.json").read_text(encoding="utf-8"))["world_size"]
    rate, memory = median_rate(records, unit), peak_memory(records) / 2**30
    return [
        ("model", f"{parameters:,} parameters, {active:,} active per token"),
        (
            "training loss",
            "{:.3f} at the first step, {:.3f} over the last 10 steps".format(*losses),
        ),
        *_scores(scores),
        *_routing(records[-1]),
        ("speed", f"{rate:,.0f} {unit}s/s in training on {processes} processes"),
        ("peak memory", f"{memory:.2f} GiB per process"),
    ]


def _scores(scores: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows with the scores of images, or of text beside a unigram model."""
    if "top1" in scores:
        accuracy = f"{scores['top1']:.4f} on {scores['images_scored']:,} held-out images"
        return [("accuracy", accuracy), ("calibration error", f"{scores['calibration_error']:.4f}")]
    prepared = PreparedData.open(Path(scores["data"]))
    splits = prepared.split("train"), prepared.split("validation")
    unigram = unigram_perplexity(*splits, prepared.manifest.tokenizer.vocab_size)
    tokens = f"{scores['tokens_scored']:,} held-out tokens"
    return [
        ("perplexity", f"{scores['perplexity']:.1f} on {tokens}"),
        ("unigram baseline", f"{unigram:.1f} on the same tokens"),
        ("bits per byte", f"{scores['bits_per_byte']:.3f}"),
    ]


def _routing(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows with the routing statistics of a step; empty for a dense model."""
    rows = []
    if "routing/load_max" in record:
        busiest, unused = record["routing/load_max"], 100 * record["routing/unused"]
        load = f"busiest expert {busiest:.2f} times the mean, {unused:.0f}% of experts unused"
        rows.append(("expert load", load))
    if "routing/effective_neighbours" in record:
        similar = f"about {record['routing/effective_neighbours']:.0f} similar tokens"
        rows.append(("token graph", f"each token's routing averages over {similar}"))
    return rows


def unigram_perplexity(train: TokenStream, held_out: TokenStream, vocab_size: int) -> float:
    """Perplexity of a unigram model with add-one smoothing.

    Args:
        train: the split whose tokens are counted.
        held_out: the split that is scored, end-of-text tokens included.
        vocab_size: V.

    Returns:
        exp of the mean negative log-likelihood of a token of `held_out`.
    """
    counts_V = frequencies(train, vocab_size)
    log_probability_V = np.log(counts_V + 1.0) - math.log(int(counts_V.sum()) + vocab_size)
    scored_V = frequencies(held_out, vocab_size)
    return math.exp(-float(scored_V @ log_probability_V) / int(scored_V.sum()))


if __name__ == "__main__":
    run, scores = map(Path, sys.argv[1:])
    print("\n".join(aligned(summary(run, json.loads(scores.read_text())), "<")))
