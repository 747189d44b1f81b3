"""A run in a few lines, beside a simple baseline: the end of `configs/quickstart/run.sh`.

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

from polyad.data.images.augmentation import evaluation_image
from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.data.images.source import ImageSplit
from polyad.data.text.dataset import PreparedData, TokenStream
from polyad.model.build import count_parameters
from polyad.train.config.adaptation import model_of, unused_parameters
from polyad.train.config.run import load_config
from polyad.train.experts.token_classes import frequencies
from polyad.train.records import last_loss, median_rate, peak_memory, read_records
from polyad.train.results import aligned
from polyad.train.tasks.registry import task_class


def summary(run: Path, scores: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values: the model, its losses, scores, routing and speed.

    Args:
        run: a run's folder.
        scores: what `polyad evaluate --json` wrote about it.
    """
    records, config = read_records(run), load_config(run / "config.yaml")
    model, unit = model_of(config), task_class(config.data.kind).unit.name
    parameters = count_parameters(model)
    active = parameters - unused_parameters(model)
    losses = records[0]["loss"], last_loss(records)
    processes = json.loads((run / "environment.json").read_text(encoding="utf-8"))["world_size"]
    rate, memory = median_rate(records, unit), peak_memory(records) / 2**30
    if isinstance(config.data, ImageDataConfig):
        of_kind = _of_images(ImageData.open(config.data), scores)
    else:
        of_kind = _of_text(Path(scores["data"]), scores)
    return [
        ("model", f"{parameters:,} parameters, {active:,} active per token"),
        (
            "training loss",
            "{:.3f} at the first step, {:.3f} over the last 10 steps".format(*losses),
        ),
        *of_kind,
        *_routing(records[-1]),
        ("speed", f"{rate:,.0f} {unit}s/s in training on {processes} processes"),
        ("peak memory", f"{memory:.2f} GiB per process"),
    ]


def _of_text(data: Path, scores: dict[str, Any]) -> list[tuple[str, str]]:
    prepared = PreparedData.open(data)
    splits = prepared.split("train"), prepared.split("validation")
    unigram = unigram_perplexity(*splits, prepared.manifest.tokenizer.vocab_size)
    tokens = f"{scores['tokens_scored']:,} held-out tokens"
    return [
        ("perplexity", f"{scores['perplexity']:.1f} on {tokens}"),
        ("unigram baseline", f"{unigram:.1f} on the same tokens"),
        ("bits per byte", f"{scores['bits_per_byte']:.3f}"),
    ]


def _of_images(data: ImageData, scores: dict[str, Any]) -> list[tuple[str, str]]:
    pixels = scores["image_size"]
    nearest = nearest_neighbour_accuracy(data.split("train"), data.split("validation"), pixels)
    of_nearest = f"class of the nearest training image, {pixels} x {pixels} pixels"
    return [
        ("accuracy", f"{scores['top1']:.4f} on {scores['images_scored']:,} held-out images"),
        ("nearest neighbour", f"{nearest:.4f}: {of_nearest}"),
        ("calibration error", f"{scores['calibration_error']:.4f}"),
        ("held out", str(scores["held_out"])),
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


def nearest_neighbour_accuracy(train: ImageSplit, held_out: ImageSplit, size: int) -> float:
    """Share of the held-out images whose nearest training image has their class.

    Args:
        train: training images.
        held_out: held-out images.
        size: side that all are resized to, in pixels; distances are Euclidean, over the pixels.

    Returns:
        From 0 to 1.
    """
    from sklearn.neighbors import KNeighborsClassifier

    train_NP, held_out_MP = (
        [evaluation_image(part.decode(n), size, 1.0).flatten().numpy() for n in range(len(part))]
        for part in (train, held_out)
    )
    nearest = KNeighborsClassifier(1).fit(train_NP, train.labels)
    return float(nearest.score(held_out_MP, held_out.labels))


if __name__ == "__main__":
    run, scores = map(Path, sys.argv[1:])
    print("\n".join(aligned(summary(run, json.loads(scores.read_text())), "<")))
