"""`polyad evaluate`: scores a checkpoint on held-out data, text by its perplexity."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from polyad.data.errors import DataError
from polyad.data.files import temporary_folder
from polyad.data.images.augmentation import GaussianNoise
from polyad.data.text.attack import WordSwap, write_attacked
from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.weights import Choice, load_model
from polyad.train.config.smaller import to_evaluate
from polyad.train.console import Progress
from polyad.train.errors import ConfigError, RunError
from polyad.train.evaluation.leak import check_leaks, measure
from polyad.train.guard.memory import explain_out_of_memory
from polyad.train.loop.device import allow_tf32
from polyad.train.reading import Evaluated, open_evaluated
from polyad.train.results import aligned
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.losses import cross_entropy
from polyad.train.tasks.registry import task_class
from polyad.train.tasks.task import OneDevice, Task


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
        explain_out_of_memory(lambda: f"evaluating {split}", world, lambda: to_evaluate(config)),
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
    return "\n".join(aligned(rows, "<"))
