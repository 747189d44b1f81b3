"""`polyad evaluate`: scores a checkpoint on held-out data, text by its perplexity."""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from polyad.data.errors import DataError
from polyad.data.images.noise import GaussianNoise
from polyad.data.temporary import temporary_folder
from polyad.data.text.attack import WordSwap, write_attacked
from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.weights import Choice, Weights, load_model, open_weights
from polyad.train.config.agreement import agreed_facts, folder_digest
from polyad.train.config.run import RunConfig, data_overrides, parse_config
from polyad.train.config.smaller import to_evaluate
from polyad.train.config.text import flatten
from polyad.train.console import Progress
from polyad.train.errors import ConfigError, RunError
from polyad.train.evaluation.leak import check_leaks, measure
from polyad.train.exchange.writers import config_of_weights
from polyad.train.guard.memory import explain_out_of_memory
from polyad.train.loop.device import allow_tf32
from polyad.train.tasks.cross_entropy import cross_entropy
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.registry import task_class
from polyad.train.tasks.task import OneDevice, Task


class Evaluated(NamedTuple):
    """Weights and their evaluation data, both checked."""

    weights: Weights
    config: RunConfig
    """The configuration of the weights, with the keys that evaluation may change."""
    task: Task[Any]
    choice: Choice
    """Which weights of a checkpoint."""

    def about(self) -> dict[str, Any]:
        """The keys of a result that say which weights it is of; a folder of weights is of step
        0."""
        step = self.weights.training_step if isinstance(self.weights, Checkpoint) else 0
        return {"checkpoint": str(self.weights.folder), "step": step}

    @property
    def batch_size(self) -> int:
        """Samples in a forward pass."""
        return self.config.evaluation.batch_size or self.config.train.micro_batch_size

    def joined(self, split: str | None) -> comm.World:
        """Joins the processes of this command, which all read the same.

        Args:
            split: that is read; None: none of the data.

        Raises:
            DisagreementError: a process has another checkpoint or data.
        """
        facts = agreed_facts(self.config, self.task if split else None, split)
        facts["the checkpoint"] = f"contents {folder_digest(self.weights.folder)}"
        return comm.initialize(self.config.parallel.timeout_minutes, facts=facts)

    @contextmanager
    def loaded(self, doing: str, split: str | None) -> Iterator[tuple[nn.Module, comm.World]]:
        """The model on this process's device, in evaluation mode, and the process.

        Inside the context a lack of memory is explained in one line.

        Args:
            doing: what is done with it, for that line.
            split: that is read; None: none of the data.
        """
        world = self.joined(split)
        allow_tf32(self.config.train.tf32, world.device)
        with explain_out_of_memory(lambda: doing, world, to_evaluate(self.config)):
            yield load_model(self.weights, world.device, self.config.train.precision), world

    def text(self, option: str) -> LanguageModelling:
        """The task, for an option that only text has.

        Args:
            option: of the command line, for the error.

        Raises:
            ConfigError: it is another task.
        """
        if not isinstance(self.task, LanguageModelling):
            raise ConfigError(
                f"{option}: is not allowed with data.kind: {self.config.data.kind}; text has it"
            )
        return self.task

    def images(self, option: str, *, attributes: bool = False) -> ImageClassification:
        """The task, for an option that only images have.

        Args:
            option: of the command line, for the error.
            attributes: whether images with attributes will do, beside those with one class each.

        Raises:
            ConfigError: it is another task.
        """
        if not isinstance(self.task, ImageClassification) or (
            self.task.has_attributes and not attributes
        ):
            have = "images and attributes have" if attributes else "images has"
            raise ConfigError(
                f"{option}: is not allowed with data.kind: {self.config.data.kind}; {have} it"
            )
        return self.task


def open_evaluated(
    path: Path,
    data: str | None,
    overrides: tuple[str, ...],
    weights: Choice = "trained",
    base: Path | None = None,
) -> Evaluated:
    """Opens weights, and data that fits them.

    Args:
        path: a checkpoint, a run whose newest one is taken, or a folder of weights.
        data: prepared data; None takes the run's.
        overrides: `key=value` for keys that evaluation reads.
        weights: which of the checkpoint's.
        base: see `open_weights`.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    return open_data_for(open_weights(path, weights, base), data, overrides, weights)


def open_data_for(
    opened: Weights, data: str | None, overrides: tuple[str, ...], choice: Choice
) -> Evaluated:
    """Opens data that fits weights; see `open_evaluated`."""
    original = config_of(opened)
    if data is not None:
        overrides = (*overrides, *data_overrides(original, data))
    elif not isinstance(opened, Checkpoint) and "path" in type(original.data).model_fields:
        raise ConfigError(
            f"{opened.folder}: is a folder of weights, which names no data; --data DATA does"
        )
    origin = f"{opened.folder / 'config.yaml'} with overrides"
    config = parse_config(original.to_yaml(), overrides, origin=origin)
    _refuse_other_keys(original, config)
    task = task_class(config.data.kind).open_held_out(config.for_task(), opened)
    return Evaluated(opened, config, task, choice)


def config_of(weights: Weights) -> RunConfig:
    """The configuration of a checkpoint, or what a folder of weights says of one.

    What had to be assumed of a folder goes to standard error.
    """
    if isinstance(weights, Checkpoint):
        return parse_config(weights.config_yaml, origin=f"{weights.folder / 'config.yaml'}")
    config, notes = config_of_weights(weights.model_config(), weights.folder, weights.folder.name)
    for note in notes:
        print(f"polyad: {note}", file=sys.stderr, flush=True)
    return config


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
) -> dict[str, Any]:
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

    Returns:
        The result: scores, counts, and how they were made. The same on every process.
    """
    opened = open_evaluated(path, data, overrides, weights, base)
    return evaluate_opened(opened, split, attack=attack, leak=leak)


def evaluate_opened(
    opened: Evaluated,
    split: SplitName,
    *,
    model: nn.Module | None = None,
    attack: WordSwap | GaussianNoise | None = None,
    leak: int | None = None,
) -> dict[str, Any]:
    """Evaluates weights that were opened; see `evaluate`.

    Args:
        opened: the weights and their data.
        split: `validation`, `test` or `train`.
        model: on the device of this process, in evaluation mode; None: it is loaded.
        attack: see `evaluate`.
        leak: see `evaluate`.
    """
    config, task = opened.config, opened.task
    if leak is not None:
        opened.text("--leak")
        check_leaks(config, opened.weights.folder)
    task.check_split(split)
    world = opened.joined(split)
    allow_tf32(config.train.tf32, world.device)
    unit, leaked = task.unit, None
    with (
        _attacked(opened, split, attack, world) as (task, attacked),
        explain_out_of_memory(lambda: f"evaluating {split}", world, to_evaluate(config)),
    ):
        count = task.units_of(split)
        report = Progress(f"evaluate {split}", count, unit.short) if world.is_main else None
        if model is None:
            model = load_model(opened.weights, world.device, config.train.precision)
        started = time.monotonic()
        scores = task.score(
            OneDevice(model, cross_entropy),
            split,
            batch_size=opened.batch_size,
            world=world,
            report=report,
        )
        seconds = time.monotonic() - started
        if leak is not None:
            assert isinstance(task, LanguageModelling)
            masked = Progress("with the mask", count) if world.is_main else None
            prefix = Progress("from the prefix", leak) if world.is_main else None
            leaked = measure(
                *(model, task.windows(task.split(split)[0])),
                tokens=leak,
                batch_size=opened.batch_size,
                world=world,
                reports=(masked, prefix),
            )
    return {
        **opened.about(),
        "weights": opened.choice,
        "data_kind": config.data.kind,
        "data": task.name,
        "split": split,
        "attack": attacked,
        **scores,
        "leak": leaked,
        "precision": config.train.precision,
        "processes": world.size,
        "seconds": seconds,
        f"{unit.name}s_per_second": scores[f"{unit.name}s_scored"] / seconds,
    }


@contextmanager
def _attacked(
    opened: Evaluated,
    split: SplitName,
    attack: WordSwap | GaussianNoise | None,
    world: comm.World,
) -> Iterator[tuple[Task[Any], dict[str, Any] | None]]:
    """The task with its split after an attack, in files of this process that are gone afterwards,
    and what is said of that."""
    if attack is None:
        yield opened.task, None
        return
    if isinstance(attack, GaussianNoise):
        images = opened.images("--attack gaussian-noise", attributes=True)
        said = {"kind": "gaussian-noise", "rate": attack.rate, "seed": attack.seed}
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
        said = {"kind": "word-swap", "rate": attack.rate, "seed": attack.seed}
        said |= {"words": text.words, "replaced": text.replaced}
        yield task.attacked(split, text.stream, text.info), said


def _refuse_other_keys(original: RunConfig, changed: RunConfig) -> None:
    allowed = ("evaluation.", "data.", "train.precision", "train.tf32")
    before, after = (flatten(c.model_dump(mode="json")) for c in (original, changed))
    for key in after:
        if before.get(key) != after[key] and not key.startswith(allowed):
            raise ConfigError(
                f"{key}: evaluation cannot change it; it can change evaluation.*, data.path, "
                f"train.precision and train.tf32"
            )


def _attack_row(attack: dict[str, Any] | None) -> list[tuple[str, str]]:
    if attack is None:
        return []
    if attack["kind"] == "gaussian-noise":
        noise = f"Gaussian noise of {attack['rate']:g} on pixels from 0 to 1"
        return [("attack", f"{noise} (seed {attack['seed']})")]
    counts = f"{attack['replaced']:,} of {attack['words']:,} words are AAA"
    return [("attack", f"{counts} (rate {attack['rate']:g}, seed {attack['seed']})")]


def _weights_row(result: dict[str, Any]) -> list[tuple[str, str]]:
    average = result["weights"] == "ema"
    return [("weights", "their moving average (train.ema)")] if average else []


def _leak_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    leak = result["leak"]
    if leak is None:
        return []
    error = leak["prefix_standard_error"]
    return [
        (
            "with the mask",
            f"{leak['masked_loss']:.4f} nats a token, {leak['masked_loss'] - result['loss']:+.4f}: "
            f"no token sees later ones",
        ),
        (
            "from the prefix",
            f"{result['loss'] + leak['prefix_difference']:.4f} nats a token, "
            f"{leak['prefix_difference']:+.4f} ± {error:.4f} (standard error): windows cut at "
            f"{leak['prefix_tokens']:,} tokens",
        ),
    ]


def result_table(result: dict[str, Any]) -> str:
    """An evaluation for a person."""
    task = task_class(result["data_kind"])
    units = f"{task.unit.name}s"
    rows = [
        ("checkpoint", result["checkpoint"]),
        *_weights_row(result),
        ("split", f"{result['split']} of {result['data']}"),
        *task.score_rows(result),
        *_attack_row(result["attack"]),
        *_leak_rows(result),
        ("speed", f"{result[f'{units}_per_second']:,.0f} {units}/s"),
        ("processes", f"{result['processes']}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)
