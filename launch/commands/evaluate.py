"""Commands that score checkpoints on held-out data.

Each runs in one process, or in each process that torchrun has started; rank 0 shows the result.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from polyad.launch.command import (
    Argument,
    Json,
    Overrides,
    UsageError,
    command,
    non_negative,
    share,
)
from polyad.launch.commands.held_out import (
    Found,
    HeldOut,
    Stored,
    Tokens,
    examined,
    show_measured,
)
from polyad.launch.commands.options import (
    Base,
    Best,
    CheckpointOrRun,
    Data,
    Weights,
)


@command(
    "evaluate",
    "polyad evaluate runs/quickstart/run --split test evaluation.stride=128",
    "polyad evaluate runs/quickstart/run/checkpoints/step-00000100 --json - > result.json",
    "polyad evaluate runs/quickstart/run --attack word-swap --rate 0.1 --seed 1",
)
def evaluate(
    path: CheckpointOrRun,
    overrides: Overrides,
    held: Stored,
    *,
    attack: Annotated[
        Literal["word-swap", "gaussian-noise"] | None,
        Argument(
            "perturb the input before scoring: replace words of text with AAA, or add Gaussian "
            "noise to images"
        ),
    ] = None,
    rate: Annotated[
        float | None,
        Argument(
            "with --attack: fraction of the words, or standard deviation of the noise for pixel "
            "values in 0 to 1; a number from 0 to 1",
            "R",
            share,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        Argument(
            "with --attack: random seed for the choice of words, or for the noise; default 0",
            "S",
            non_negative,
        ),
    ] = None,
) -> None:
    """Scores a checkpoint on held-out data: perplexity, accuracy or other metrics of its task."""
    for option, value in (("--rate", rate), ("--seed", seed)):
        if value is not None and attack is None:
            raise UsageError(f"{option}: {value} means nothing without --attack")
    if attack is not None and rate is None:
        raise UsageError(f"--attack {attack}: needs --rate, a number from 0 to 1")

    def measure(checkpoint: Path) -> Found:
        from polyad.data.images.augmentation import GaussianNoise
        from polyad.data.text.attack import WordSwap
        from polyad.train.evaluation.evaluate import evaluate

        attacked: WordSwap | GaussianNoise | None = None
        if attack is not None and rate is not None:
            kind = WordSwap if attack == "word-swap" else GaussianNoise
            attacked = kind(rate, seed or 0)
        result = evaluate(
            checkpoint,
            attack=attacked,
            **held.keywords(overrides),
        )
        return result, result.text()

    asked: dict[str, Any] = {"overrides": overrides, "attack": attack, "rate": rate, "seed": seed}
    show_measured("evaluate", path, held, asked, measure)


@command(
    "compare",
    "polyad compare runs/quickstart/run --with runs/quickstart/run/checkpoints/step-00000100",
)
def compare(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    other: Annotated[
        Path,
        Argument(
            "the checkpoint to compare with (for a run, its newest)",
            "CHECKPOINT_OR_RUN",
            flag="--with",
        ),
    ],
    tokens: Tokens = None,
    held: HeldOut,
) -> None:
    """Compares the routing of two checkpoints.

    For each layer: the fraction of tokens that are sent to different experts, and the ratio of the
    routing entropies.
    """
    asked = {"overrides": overrides, "other": other, "tokens": tokens}

    def measure(checkpoint: Path) -> Found:
        from polyad.parallel.checkpoint.load import read_newest
        from polyad.train.measures.comparison import Comparison

        second = asked["other"]
        assert isinstance(second, Path)
        read = {} if tokens is None else {"units": tokens}
        return read_newest(
            second,
            lambda other: examined(checkpoint, Comparison, held, overrides, other=other, **read),
        )

    show_measured("compare", path, held, asked, measure)


@command("robustness", "polyad robustness runs/quickstart/run --set a --images imagenet-a")
def robustness(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    kind: Annotated[
        Literal["c", "a", "r", "o"], Argument("ImageNet-C, -A, -R or -O", flag="--set")
    ],
    images: Annotated[str, Argument("the benchmark's folder", "IMAGES")],
    data: Data = None,
    best: Best = False,
    json: Json = None,
    weights: Weights = "trained",
    base: Base = None,
) -> None:
    """Scores an ImageNet model on a published robustness benchmark, such as ImageNet-C."""
    held = Stored(data=data, best=best, json=json, weights=weights, base=base)

    def measure(checkpoint: Path) -> Found:
        from polyad.data.errors import user_path
        from polyad.train.measures.robustness import Robustness

        options = {"set": kind, "folder": user_path(images)}
        return examined(checkpoint, Robustness, held, overrides, **options)

    asked = {"overrides": overrides, "set": kind, "images": images}
    show_measured("robustness", path, held, asked, measure)
