"""`polyad evaluate`: perplexity of a checkpoint on prepared data."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import DataError
from data.text.attack import WordSwap, write_attacked
from data.text.dataset import PreparedData, TokenStream
from data.text.manifest import SplitInfo, SplitName
from data.text.windows import EvaluationWindows
from parallel import comm
from parallel.checkpoint.checkpoint import Checkpoint
from parallel.weights import load_model, open_checkpoint
from train.config.resolve import open_data, tokenizer_of
from train.config.run import RunConfig, parse_config
from train.config.text import flatten
from train.errors import ConfigError, RunError
from train.evaluation.leak import check_leaks, measure
from train.guard.memory import explain_out_of_memory, to_evaluate
from train.loop.device import allow_tf32
from train.loop.metrics import Console, bar, duration
from train.tasks.scoring import perplexities, score_windows


class Progress:
    """A console line with share, rate and time left, for the main process.

    Args:
        what: is done.
        amount: of it, in all.
        unit: of the amount.
    """

    def __init__(self, what: str, amount: float, unit: str = "tok") -> None:
        self._what, self._amount, self._unit = what, amount, unit
        self._start = time.monotonic()
        self._console, self._last = Console(sys.stderr), 0.0

    def __call__(self, share: float) -> None:
        """Shows how far it is, now and then."""
        now = time.monotonic()
        if share < 1 and now - self._last < (0.2 if sys.stderr.isatty() else 10):
            return
        self._last, seconds = now, max(now - self._start, 1e-9)
        self._console.show(
            f"{self._what} {bar(share)} {100 * share:3.0f}%  "
            f"{self._amount * share / seconds:,.0f} {self._unit}/s  "
            f"{duration(seconds * (1 - share) / max(share, 1e-9))} left"
        )
        if share >= 1:
            self._console.end()


class Evaluated(NamedTuple):
    """A checkpoint and what it is evaluated on, checked."""

    checkpoint: Checkpoint
    config: RunConfig
    """That of the checkpoint, with what evaluation may change."""
    data: PreparedData

    @property
    def batch_size(self) -> int:
        """Windows in a forward pass."""
        return self.config.evaluation.batch_size or self.config.train.micro_batch_size


def open_evaluated(path: Path, data: str | None, overrides: tuple[str, ...]) -> Evaluated:
    """Opens a checkpoint and data of its tokenizer.

    Args:
        path: a checkpoint, or a run whose newest one is taken.
        data: prepared data; None takes the run's.
        overrides: `key=value` for keys that evaluation reads.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    checkpoint = open_checkpoint(path)
    if data is not None:
        overrides = (*overrides, f"data.path={json.dumps(data)}", "data.mixture=null")
    saved = checkpoint.folder / "config.yaml"
    original = parse_config(checkpoint.config_yaml, origin=f"{saved}")
    config = parse_config(checkpoint.config_yaml, overrides, origin=f"{saved} with overrides")
    _refuse_other_keys(original, config)
    if config.data.mixture is not None:
        folders = ", ".join(source.path for source in config.data.mixture)
        raise ConfigError(f"data.mixture: evaluate one folder at a time, with --data, of {folders}")
    prepared = open_data(
        config.data.path,
        checkpoint.state.tokenizer_fingerprint,
        "checkpoint",
        lambda: tokenizer_of(checkpoint),
    )
    return Evaluated(checkpoint, config, prepared)


def evaluate(
    path: Path,
    *,
    data: str | None = None,
    split: SplitName = "validation",
    overrides: tuple[str, ...] = (),
    attack: WordSwap | None = None,
    leak: int | None = None,
) -> dict[str, Any]:
    """Evaluates a checkpoint, in one process or under torchrun.

    Args:
        path: a checkpoint, or a run whose newest one is taken.
        data: prepared data; None takes the run's.
        split: `validation`, `test` or `train`.
        overrides: `key=value` for keys that evaluation reads.
        attack: what happens to the text before it is read.
        leak: of a model whose graphs have no mask: about how many tokens are scored again, each
            from what is before it alone; None: none.

    Returns:
        The result: scores, counts, and how they were made. The same on every process.
    """
    opened = open_evaluated(path, data, overrides)
    checkpoint, config, prepared = opened
    stride = config.evaluation.stride or config.model.sequence_length
    if leak is not None:
        check_leaks(config, checkpoint.folder)

    def windows_of(stream: TokenStream) -> EvaluationWindows:
        end = prepared.manifest.tokenizer.end_of_text_id
        return EvaluationWindows(stream, config.model.sequence_length, stride, end)

    windows = windows_of(prepared.split(split))
    counts, attacked = prepared.manifest.splits[split], None
    world = comm.initialize(config.parallel.timeout_minutes)
    allow_tf32(config.train.tf32, world.device)
    with (
        _attacked(prepared, split, attack, world) as text,
        explain_out_of_memory(lambda: f"evaluating {split}", world, to_evaluate(config)),
    ):
        if text is not None:
            stream, counts, attacked = text
            windows = windows_of(stream)
        report = Progress(f"evaluate {split}", counts.tokens) if world.is_main else None
        model = load_model(checkpoint.folder, device=world.device, precision=config.train.precision)
        started = time.monotonic()
        score = score_windows(
            model, windows, batch_size=opened.batch_size, world=world, report=report
        )
        seconds = time.monotonic() - started
        leaked = None
        if leak is not None:
            masked = Progress("with the mask", counts.tokens) if world.is_main else None
            prefix = Progress("from the prefix", leak) if world.is_main else None
            leaked = measure(
                *(model, windows),
                tokens=leak,
                batch_size=opened.batch_size,
                world=world,
                reports=(masked, prefix),
            )
    return {
        "checkpoint": str(checkpoint.folder),
        "step": checkpoint.training_step,
        "data": str(config.data.path),
        "split": split,
        "attack": attacked,
        **perplexities(score, words=counts.words, bytes_=counts.bytes),
        "tokens_scored": score.tokens,
        "leak": leaked,
        "words": counts.words,
        "bytes": counts.bytes,
        "documents": counts.documents,
        "end_of_text_scored": True,
        "word": f"separated by white space in the {'attacked' if attack else 'original'} text",
        "sequence_length": config.model.sequence_length,
        "stride": stride,
        "precision": config.train.precision,
        "processes": world.size,
        "seconds": seconds,
        "tokens_per_second": score.tokens / seconds,
    }


class _Attacked(NamedTuple):
    stream: TokenStream
    counts: SplitInfo
    said: dict[str, Any]
    """JSON values."""


@contextmanager
def _attacked(
    prepared: PreparedData, split: SplitName, attack: WordSwap | None, world: comm.World
) -> Iterator[_Attacked | None]:
    """The split after an attack, in files of this process that are gone afterwards."""
    if attack is None:
        yield None
        return
    stream = prepared.split(split)
    report = Progress(f"attack {split}", stream.num_tokens) if world.is_main else None
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="polyad-attacked-"))
            text = write_attacked(
                stream, prepared.tokenizer(), attack, Path(folder) / split, report
            )
        except DataError as error:
            raise ConfigError(f"--attack: {error}") from None
        except OSError as error:
            raise RunError(
                f"--attack: the attacked text cannot be written to {tempfile.gettempdir()}: "
                f"{error.strerror}; TMPDIR names another place"
            ) from None
        said = {"kind": "word-swap", "rate": attack.rate, "seed": attack.seed}
        said |= {"words": text.words, "replaced": text.replaced}
        yield _Attacked(text.stream, text.info, said)


def _refuse_other_keys(original: RunConfig, changed: RunConfig) -> None:
    allowed = ("evaluation.", "data.", "train.precision", "train.tf32")
    before, after = (flatten(c.model_dump(mode="json")) for c in (original, changed))
    for key in after:
        if before.get(key) != after[key] and not key.startswith(allowed):
            raise ConfigError(
                f"{key}: evaluation cannot change it; it can change evaluation.*, data.path, "
                f"train.precision and train.tf32"
            )


def _word_perplexity(result: dict[str, Any]) -> str:
    if result["words"] == 0:
        return "none: the split is white space alone, without a word"
    return f"{result['word_perplexity']:,.3f} (words by white space)"


def _attack_row(attack: dict[str, Any] | None) -> list[tuple[str, str]]:
    if attack is None:
        return []
    counts = f"{attack['replaced']:,} of {attack['words']:,} words are AAA"
    return [("attack", f"{counts} (rate {attack['rate']:g}, seed {attack['seed']})")]


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
    rows = [
        ("checkpoint", result["checkpoint"]),
        ("split", f"{result['split']} of {result['data']}"),
        ("loss", f"{result['loss']:.4f} nats a token"),
        ("perplexity", f"{result['perplexity']:.3f} a token"),
        ("word perplexity", _word_perplexity(result)),
        ("bits per byte", f"{result['bits_per_byte']:.4f}"),
        ("scored", f"{result['tokens_scored']:,} tokens, end-of-text included"),
        *_attack_row(result["attack"]),
        *_leak_rows(result),
        ("window", f"{result['sequence_length']} tokens, stride {result['stride']}"),
        ("speed", f"{result['tokens_per_second']:,.0f} tokens/s"),
        ("processes", f"{result['processes']}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)
