"""`polyad evaluate`: scores a checkpoint on held-out data, text by its perplexity."""

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
from polyad.train.experts.interventions import Intervention
from polyad.train.experts.replay import (
    Choices,
    first_rows,
    read_choices,
    recording,
    replaying,
    write_choices,
)
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
class Routing:
    """Files to which the experts of all tokens are written, or from which they are read."""

    record: Path | None = None
    """The file to write."""
    replay: Path | None = None
    """The file to read."""

    @contextmanager
    def around(
        self, model: nn.Module, task: Task[Any], about: Mapping[str, str], world: comm.World
    ) -> Iterator[dict[str, str] | None]:
        """A context that records or replays the routing of the scoring inside it.

        Args:
            model: the model that is scored, whole on each process.
            task: the task whose split is scored, after an attack.
            about: metadata of a file: the checkpoint, its step, a digest of the data, the split.
            world: this process.

        Yields:
            Entries for the result; None if nothing is recorded or replayed.

        Raises:
            ConfigError: the model does not have such routing, or the file belongs to other data.
        """
        if self == OWN_ROUTING:
            yield None
            return
        rows = task.rows_of(about["split"])
        if rows is None:
            option = "--replay-routing" if self.record is None else "--record-routing"
            raise ConfigError(f"{option}: is not possible with {task.place}")
        said: dict[str, str] = {}
        recorder = None
        with ExitStack() as stack:
            if self.replay is not None:
                choices, theirs = read_choices(self.replay)
                _check_data(self.replay, theirs, about, choices, rows)
                rank, ranks = world.data_parallel_rank, world.data_parallel_size
                stack.enter_context(replaying(model, choices, rank=rank, ranks=ranks, fills=True))
                said |= {"replayed": str(self.replay), "of": theirs.get("checkpoint", "unknown")}
            if self.record is not None:
                recorder = stack.enter_context(recording(model))
                said |= {"recorded": str(self.record)}
            yield said
        found = None if recorder is None else recorder.of_all(world)
        if found is not None and self.record is not None:
            write_choices(self.record, first_rows(found, rows), about)


OWN_ROUTING = Routing()
"""The model's own routing, not recorded."""


def _check_data(
    path: Path, about: Mapping[str, str], facts: Mapping[str, str], choices: Choices, rows: int
) -> None:
    """Checks that a file of choices belongs to the data that is scored."""
    for name in ("data", "split"):
        if about.get(name) != facts[name]:
            raise ConfigError(
                f"--replay-routing: {path}: was recorded with {name} {about.get(name)}, but "
                f"{facts[name]} is scored"
            )
    recorded = len(next(iter(choices.values())).tokens_R)
    if recorded != rows:
        raise ConfigError(
            f"--replay-routing: {path}: has {recorded:,} sequences or images, but {rows:,} are "
            "scored"
        )


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
    routing: dict[str, str] | None
    """The file to which routing was recorded, the file from which it was replayed, and the
    checkpoint of the latter; None: the model's own routing, not recorded."""
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
            *self._routing(),
            *(("intervention", str(each)) for each in self.interventions),
            ("speed", f"{speed:,.0f} {units}/s"),
            ("processes", f"{self.processes}"),
        ]
        return "\n".join(aligned(rows, "<"))

    def _routing(self) -> Iterator[tuple[str, str]]:
        found = self.routing or {}
        if "replayed" in found:
            yield (
                "routing",
                f"replayed from {found['of']} ({found['replayed']}), not the model's own",
            )
        if "recorded" in found:
            yield "routing recorded", found["recorded"]


def evaluate(
    path: Path,
    *,
    data: str | None = None,
    split: SplitName = "validation",
    overrides: tuple[str, ...] = (),
    attack: WordSwap | GaussianNoise | None = None,
    routing: Routing = OWN_ROUTING,
    weights: Choice = "trained",
    base: Path | None = None,
    stream: Path | None = None,
    interventions: Sequence[Intervention] = (),
) -> Evaluation:
    """Evaluates a checkpoint, in one process or under torchrun.

    Args:
        path: a checkpoint, a run (its newest checkpoint), or a folder of weights.
        data: prepared data; None: the run's.
        split: `validation`, `test` or `train`.
        overrides: `key=value` for keys that evaluation reads.
        attack: perturbation of the text or images before they are read.
        routing: where routing is recorded, or replayed from.
        weights: which of the checkpoint's weights.
        base: see `open_weights`.
        stream: see `open_evaluated`.
        interventions: see `open_evaluated`.

    Returns:
        The same on every process.
    """
    opened = open_evaluated(path, data, overrides, weights, base, stream, interventions)
    return evaluate_opened(opened, split, attack=attack, routing=routing)


def evaluate_opened(
    opened: Evaluated,
    split: SplitName,
    *,
    model: nn.Module | None = None,
    attack: WordSwap | GaussianNoise | None = None,
    routing: Routing = OWN_ROUTING,
) -> Evaluation:
    """Evaluates opened weights; see `evaluate`.

    Args:
        opened: the weights and their data.
        split: `validation`, `test` or `train`.
        model: the model on this process's device, in evaluation mode; None: it is loaded.
        attack: see `evaluate`.
        routing: see `evaluate`.
    """
    opened.task.check_split(split)
    needs_whole = None
    if routing != OWN_ROUTING:
        needs_whole = "routing is recorded and replayed in a whole model"
    about = {name: str(value) for name, value in opened.about().items()}
    about |= {"data": opened.task.contents(split), "split": split}
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
        with routing.around(model, task, about, world) as routed:
            scores = predicting(
                model,
                lambda predictor, told: task.score(
                    predictor, split, batch_size=opened.batch_size, world=world, report=told
                ),
                f"evaluate {split}",
                report,
            )
        loss = scores.to_json()["loss"]
        if not math.isfinite(loss):
            raise RunError(
                f"{opened.weights.folder}: the loss on {split} is {loss}, although all weights are "
                f"finite: numbers overflow in {opened.config.train.precision}"
            )
        seconds = time.monotonic() - started + seconds_before(model)
    return Evaluation(
        **opened.about(),
        weights=opened.choice,
        data_kind=opened.config.data.kind,
        data=task.name,
        split=split,
        attack=attacked,
        routing=routed,
        interventions=opened.interventions,
        scores=scores,
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
    """Yields the task with its split after an attack, in temporary files of this process, and a
    description of the attack."""
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
                f"--attack: the perturbed text cannot be written to {tempfile.gettempdir()}: "
                f"{error.strerror}; set TMPDIR to another folder"
            ) from None
        said = Attacked(
            kind="word-swap",
            rate=attack.rate,
            seed=attack.seed,
            words=text.words,
            replaced=text.replaced,
        )
        yield task.attacked(split, text.stream, text.info), said
