"""`polyad evaluate`: scores a checkpoint on held-out data, text by its perplexity."""

import math
import time
from typing import Any

from torch import nn

from polyad.data.errors import prefixed
from polyad.data.images.augmentation import GaussianNoise
from polyad.data.text.attack import WordSwap, attacked_split
from polyad.data.text.manifest import SplitName
from polyad.train.errors import ConfigError, RunError
from polyad.train.reading import EvaluationContext
from polyad.train.results import Progress, aligned, in_words
from polyad.train.streaming import predicting
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.task import Scoring, Task


def evaluate(
    opened: EvaluationContext,
    split: SplitName = "validation",
    *,
    model: nn.Module | None = None,
    attack: WordSwap | GaussianNoise | None = None,
) -> tuple[dict[str, Any], str]:
    """Evaluates weights, in one process or under torchrun.

    Args:
        opened: the weights and their data.
        split: `validation`, `test` or `train`.
        model: the model on this process's device, in evaluation mode; None: it is loaded.
        attack: perturbation of the text or images before they are read.

    Returns:
        The values of `--json`, scores and how they were measured, and the same as text; equal on
        every process.
    """
    opened.task.check_split(split)
    with opened.loaded(f"evaluating {split}", split, model, needs_whole=None) as (model, world):
        task, attacked = _attacked(opened, split, attack)
        count = task.units_of(split)
        report = Progress(f"evaluate {split}", count, task.unit.short) if world.is_main else None
        started = time.monotonic()
        scores = predicting(
            model,
            lambda predictor, progress: task.score(
                Scoring(predictor, opened.batch_size, world, progress), split
            ),
            report,
        )
        loss = scores["loss"]
        if not math.isfinite(loss):
            raise RunError(
                f"{opened.weights.folder}: the loss on {split} is {loss}, although all weights are "
                f"finite: numbers overflow in {opened.config.train.precision}"
            )
        seconds = time.monotonic() - started
    units = f"{task.unit.name}s"
    speed = scores[f"{units}_scored"] / seconds
    interventions = [str(each) for each in opened.interventions]
    average = [("weights", "their moving average (train.ema)")] if opened.choice == "ema" else []
    about = opened.about(split) | {"attack": attacked}
    if interventions:
        about["interventions"] = [each.to_json() for each in opened.interventions]
    how = {"processes": world.size, "seconds": seconds}
    rows = [
        ("checkpoint", about["checkpoint"]),
        *average,
        ("split", f"{split} of {task.name}"),
        *task.rows(scores),
        *((f"attack: {name}", in_words(value)) for name, value in (attacked or {}).items()),
        *(("intervention", each) for each in interventions),
        ("speed", f"{speed:,.0f} {units}/s"),
        ("processes", f"{world.size}"),
    ]
    values = {**about, **scores, **how, f"{units}_per_second": speed}
    return values, "\n".join(aligned(rows, "<"))


def _attacked(
    opened: EvaluationContext, split: SplitName, attack: WordSwap | GaussianNoise | None
) -> tuple[Task[Any], dict[str, Any] | None]:
    """Returns the task with its split after an attack, and JSON values about the attack."""
    if attack is None:
        return opened.task, None
    about: dict[str, Any] = {"rate": attack.rate, "seed": attack.seed}
    if isinstance(attack, GaussianNoise):
        images = opened.need("--attack gaussian-noise", ImageClassification)
        return images.with_noise(attack), {"kind": "gaussian-noise", **about}
    task = opened.need("--attack word-swap", LanguageModelling)
    stream, _ = task.split(split)
    with prefixed("--attack", ConfigError):
        tokenizer = task.data.parts[0].data.tokenizer()
        text, info, replaced = attacked_split(stream, tokenizer, attack)
    about = {"kind": "word-swap", **about, "words": info.words, "replaced": replaced}
    return task.attacked(split, text, info), about
