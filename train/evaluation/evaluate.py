"""`polyad evaluate`: scores a checkpoint on held-out data, text by its perplexity."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from polyad.data.errors import DataError
from polyad.data.images.augmentation import GaussianNoise
from polyad.data.text.attack import WordSwap, attacked_split
from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.weights import Choice
from polyad.train.console import Progress
from polyad.train.errors import ConfigError, RunError
from polyad.train.experts.interventions import Intervention
from polyad.train.reading import Evaluated, open_evaluated
from polyad.train.results import aligned
from polyad.train.streaming import predicting
from polyad.train.tasks.registry import task_class
from polyad.train.tasks.task import Scores, Task


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """The perturbation of text or images before they were read."""

    kind: str
    rate: float
    seed: int
    words: int | None = None
    """Number of words in the text; None for images."""
    replaced: int | None = None
    """Number of replaced words."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        """The result as text."""
        if self.words is None:
            noise = f"Gaussian noise of {self.rate:g} on pixels from 0 to 1"
            return f"{noise} (seed {self.seed})"
        counts = f"{self.replaced:,} of {self.words:,} words replaced with AAA"
        return f"{counts} (rate {self.rate:g}, seed {self.seed})"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores of a checkpoint on held-out data, and how they were measured."""

    checkpoint: str
    step: int
    weights: Choice
    data_kind: str
    data: str
    split: str
    attack: Attacked | None
    interventions: Sequence[Intervention]
    """Changes to experts."""
    scores: Scores
    precision: str
    processes: int
    seconds: float

    @property
    def speed(self) -> dict[str, float]:
        """Units scored per second, by key."""
        units = f"{task_class(self.data_kind).unit.name}s"
        return {units: self.scores.to_json()[f"{units}_scored"] / self.seconds}

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name == "interventions" and not value:
                continue
            found |= self.scores.to_json() if name == "scores" else {name: value}
        return found | {f"{units}_per_second": speed for units, speed in self.speed.items()}

    def text(self) -> str:
        """The result as text."""
        average = "their moving average (train.ema)"
        ((units, speed),) = self.speed.items()
        rows = [
            ("checkpoint", self.checkpoint),
            *([("weights", average)] if self.weights == "ema" else []),
            ("split", f"{self.split} of {self.data}"),
            *self.scores.rows(task_class(self.data_kind)),
            *([] if self.attack is None else [("attack", str(self.attack))]),
            *(("intervention", str(each)) for each in self.interventions),
            ("speed", f"{speed:,.0f} {units}/s"),
            ("processes", f"{self.processes}"),
        ]
        return "\n".join(aligned(rows, "<"))


def evaluate(
    path: Path,
    *,
    data: str | None = None,
    split: SplitName = "validation",
    overrides: tuple[str, ...] = (),
    attack: WordSwap | GaussianNoise | None = None,
    weights: Choice = "trained",
    base: Path | None = None,
    interventions: Sequence[Intervention] = (),
) -> Evaluation:
    """Evaluates a checkpoint, in one process or under torchrun.

    Args:
        path: a checkpoint, a run (its newest checkpoint), or a folder of weights.
        data: prepared data; None: the run's.
        split: `validation`, `test` or `train`.
        overrides: `key=value` for keys that evaluation reads.
        attack: perturbation of the text or images before they are read.
        weights: which of the checkpoint's weights.
        base: see `open_weights`.
        interventions: see `open_evaluated`.

    Returns:
        The same on every process.
    """
    opened = open_evaluated(path, data, overrides, weights, base, interventions)
    return evaluate_opened(opened, split, attack=attack)


def evaluate_opened(
    opened: Evaluated,
    split: SplitName,
    *,
    model: nn.Module | None = None,
    attack: WordSwap | GaussianNoise | None = None,
) -> Evaluation:
    """Evaluates opened weights; see `evaluate`.

    Args:
        opened: the weights and their data.
        split: `validation`, `test` or `train`.
        model: the model on this process's device, in evaluation mode; None: it is loaded.
        attack: see `evaluate`.
    """
    opened.task.check_split(split)
    with opened.loaded(f"evaluating {split}", split, model, needs_whole=None) as (model, world):
        task, attacked = _attacked(opened, split, attack, world)
        count = task.units_of(split)
        report = Progress(f"evaluate {split}", count, task.unit.short) if world.is_main else None
        started = time.monotonic()
        scores = predicting(
            model,
            lambda predictor, told: task.score(
                predictor, split, batch_size=opened.batch_size, world=world, report=told
            ),
            report,
        )
        loss = scores.to_json()["loss"]
        if not math.isfinite(loss):
            raise RunError(
                f"{opened.weights.folder}: the loss on {split} is {loss}, although all weights are "
                f"finite: numbers overflow in {opened.config.train.precision}"
            )
        seconds = time.monotonic() - started
    return Evaluation(
        **opened.about(),
        weights=opened.choice,
        data_kind=opened.config.data.kind,
        data=task.name,
        split=split,
        attack=attacked,
        interventions=opened.interventions,
        scores=scores,
        precision=opened.config.train.precision,
        processes=world.size,
        seconds=seconds,
    )


def _attacked(
    opened: Evaluated,
    split: SplitName,
    attack: WordSwap | GaussianNoise | None,
    world: comm.World,
) -> tuple[Task[Any], Attacked | None]:
    """Returns the task with its split after an attack, and a description of the attack."""
    if attack is None:
        return opened.task, None
    if isinstance(attack, GaussianNoise):
        images = opened.images("--attack gaussian-noise", attributes=True)
        said = Attacked(kind="gaussian-noise", rate=attack.rate, seed=attack.seed)
        return images.with_noise(attack), said
    task = opened.text("--attack word-swap")
    stream, _ = task.split(split)
    report = Progress(f"attack {split}", stream.num_tokens) if world.is_main else None
    try:
        tokenizer = task.data.parts[0].data.tokenizer()
        text = attacked_split(stream, tokenizer, attack, report)
    except DataError as error:
        raise ConfigError(f"--attack: {error}") from None
    said = Attacked(
        kind="word-swap",
        rate=attack.rate,
        seed=attack.seed,
        words=text.words,
        replaced=text.replaced,
    )
    return task.attacked(split, text.stream, text.info), said
