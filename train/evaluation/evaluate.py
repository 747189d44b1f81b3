"""`polyad evaluate`: scores a checkpoint on held-out data, text by its perplexity."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from polyad.data.errors import DataError
from polyad.data.files import temporary_folder
from polyad.data.images.augmentation import GaussianNoise
from polyad.data.text.attack import WordSwap, write_attacked
from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.streamed import seconds_before
from polyad.parallel.weights import Choice
from polyad.train.console import Progress
from polyad.train.errors import ConfigError, RunError
from polyad.train.evaluation.leak import Leak, check_leaks, measure_leak
from polyad.train.reading import Evaluated, open_evaluated
from polyad.train.results import aligned
from polyad.train.streaming import predicting
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.registry import task_class
from polyad.train.tasks.task import Scores, Task


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """What was done to text or images before they were read."""

    kind: str
    rate: float
    seed: int
    words: int | None = None
    """Of the text; images have none."""
    replaced: int | None = None
    """Words that were replaced."""

    def to_json(self) -> dict[str, Any]:
        """What programs get."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        """What people get."""
        if self.words is None:
            noise = f"Gaussian noise of {self.rate:g} on pixels from 0 to 1"
            return f"{noise} (seed {self.seed})"
        counts = f"{self.replaced:,} of {self.words:,} words are AAA"
        return f"{counts} (rate {self.rate:g}, seed {self.seed})"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a checkpoint does on held-out data, and how that was found."""

    checkpoint: str
    step: int
    weights: Choice
    data_kind: str
    data: str
    split: str
    attack: Attacked | None
    scores: Scores
    leak: Leak | None
    precision: str
    processes: int
    seconds: float

    @property
    def speed(self) -> dict[str, float]:
        """How many units were scored in a second, by what they are."""
        units = f"{task_class(self.data_kind).unit.name}s"
        return {units: self.scores.to_json()[f"{units}_scored"] / self.seconds}

    def to_json(self) -> dict[str, Any]:
        """What programs get."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            found |= self.scores.to_json() if name == "scores" else {name: value}
        return found | {f"{units}_per_second": speed for units, speed in self.speed.items()}

    def text(self) -> str:
        """What people get."""
        average = "their moving average (train.ema)"
        ((units, speed),) = self.speed.items()
        rows = [
            ("checkpoint", self.checkpoint),
            *([("weights", average)] if self.weights == "ema" else []),
            ("split", f"{self.split} of {self.data}"),
            *self.scores.rows(task_class(self.data_kind)),
            *([] if self.attack is None else [("attack", str(self.attack))]),
            *([] if self.leak is None else self.leak.rows(self.scores.to_json()["loss"])),
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
    leak: int | None = None,
    weights: Choice = "trained",
    base: Path | None = None,
    stream: Path | None = None,
) -> Evaluation:
    """Evaluates a checkpoint, in one process or under torchrun.

    Args:
        path: a checkpoint, a run whose newest one is taken, or a folder of weights.
        data: prepared data; None takes the run's.
        split: `validation`, `test` or `train`.
        overrides: `key=value` for keys that evaluation reads.
        attack: what happens to the text or the images before they are read.
        leak: of a model whose graphs have no mask: about how many tokens are scored again, each
            from what is before it alone; None: none.
        weights: which of the checkpoint's.
        base: see `open_weights`.
        stream: see `open_evaluated`.

    Returns:
        The same on every process.
    """
    opened = open_evaluated(path, data, overrides, weights, base, stream)
    return evaluate_opened(opened, split, attack=attack, leak=leak)


def evaluate_opened(
    opened: Evaluated,
    split: SplitName,
    *,
    model: nn.Module | None = None,
    attack: WordSwap | GaussianNoise | None = None,
    leak: int | None = None,
) -> Evaluation:
    """Evaluates weights that were opened; see `evaluate`.

    Args:
        opened: the weights and their data.
        split: `validation`, `test` or `train`.
        model: on the device of this process, in evaluation mode; None: it is loaded.
        attack: see `evaluate`.
        leak: see `evaluate`.
    """
    if leak is not None:
        opened.text("--leak")
        check_leaks(opened.config, opened.weights.folder)
    opened.task.check_split(split)
    leaked = None
    needs_whole = None if leak is None else "--leak scores texts that depend on what a block gave"
    with (
        opened.loaded(f"evaluating {split}", split, model, needs_whole=needs_whole) as (
            model,
            world,
        ),
        _attacked(opened, split, attack, world) as (task, attacked),
    ):
        count = task.units_of(split)
        report = Progress(f"evaluate {split}", count, task.unit.short) if world.is_main else None
        started = time.monotonic()
        scores = predicting(
            model,
            lambda predictor, told: task.score(
                predictor, split, batch_size=opened.batch_size, world=world, report=told
            ),
            f"evaluate {split}",
            report,
        )
        seconds = time.monotonic() - started + seconds_before(model)
        if leak is not None:
            assert isinstance(task, LanguageModelling)
            windows = task.windows(task.split(split)[0])
            leaked = measure_leak(
                *(model, windows, leak), units=count, batch_size=opened.batch_size, world=world
            )
    return Evaluation(
        **opened.about(),
        weights=opened.choice,
        data_kind=opened.config.data.kind,
        data=task.name,
        split=split,
        attack=attacked,
        scores=scores,
        leak=leaked,
        precision=opened.config.train.precision,
        processes=world.size,
        seconds=seconds,
    )


@contextmanager
def _attacked(
    opened: Evaluated,
    split: SplitName,
    attack: WordSwap | GaussianNoise | None,
    world: comm.World,
) -> Iterator[tuple[Task[Any], Attacked | None]]:
    """The task with its split after an attack, in files of this process that are gone afterwards,
    and what is said of that."""
    if attack is None:
        yield opened.task, None
        return
    if isinstance(attack, GaussianNoise):
        images = opened.images("--attack gaussian-noise", attributes=True)
        said = Attacked(kind="gaussian-noise", rate=attack.rate, seed=attack.seed)
        yield images.with_noise(attack), said
        return
    task = opened.text("--attack word-swap")
    stream, _ = task.split(split)
    report = Progress(f"attack {split}", stream.num_tokens) if world.is_main else None
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder("polyad-attacked-"))
            tokenizer = task.data.parts[0].data.tokenizer()
            text = write_attacked(stream, tokenizer, attack, folder / split, report)
        except DataError as error:
            raise ConfigError(f"--attack: {error}") from None
        except OSError as error:
            raise RunError(
                f"--attack: the attacked text cannot be written to {tempfile.gettempdir()}: "
                f"{error.strerror}; TMPDIR names another place"
            ) from None
        said = Attacked(
            kind="word-swap",
            rate=attack.rate,
            seed=attack.seed,
            words=text.words,
            replaced=text.replaced,
        )
        yield task.attacked(split, text.stream, text.info), said
