"""Commands that score checkpoints on held-out data, and a run as a page.

Each runs in one process, or in each process that torchrun has started; rank 0 shows the result.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from polyad.launch.command import (
    Json,
    Names,
    NonNegative,
    Positive,
    Share,
    UsageError,
    check_result_file,
    command,
    results,
)
from polyad.launch.commands.options import (
    AnyWeights,
    Base,
    CheckpointOptions,
    Data,
    DataOptions,
    Split,
    SplitOptions,
    TokenizerFile,
    Tokens,
    Weights,
)


@command(
    "evaluate",
    "polyad evaluate runs/quickstart/run --split test evaluation.stride=128",
    "polyad evaluate runs/quickstart/run/checkpoints/step-00000100 --json - > result.json",
    "polyad evaluate runs/quickstart/run --attack word-swap --rate 0.1 --seed 1",
)
@dataclass(frozen=True, kw_only=True)
class Evaluate(CheckpointOptions):
    """Scores a checkpoint on held-out data: perplexity, accuracy, ...

    Args:
        attack: perturb the input before scoring: replace words of text with AAA, or add Gaussian
            noise to images.
        rate: with --attack: fraction of the words, or standard deviation of the noise for pixel
            values in 0 to 1; a number from 0 to 1.
        seed: with --attack: random seed for the choice of words, or for the noise; default 0.
    """

    attack: Literal["word-swap", "gaussian-noise"] | None = None
    rate: Share | None = None
    seed: NonNegative | None = None

    def run(self) -> None:
        """Checks the options, and shows the result."""
        for option, value in (("--rate", self.rate), ("--seed", self.seed)):
            if value is not None and self.attack is None:
                raise UsageError(f"{option}: {value} means nothing without --attack")
        if self.attack is not None and self.rate is None:
            raise UsageError(f"--attack {self.attack}: needs --rate, a number from 0 to 1")
        super().run()

    def measured(self, checkpoint: Path) -> tuple[object, str]:
        """Returns the scores."""
        from polyad.data.images.augmentation import GaussianNoise
        from polyad.data.text.attack import WordSwap
        from polyad.train.evaluation.evaluate import evaluate

        attack: WordSwap | GaussianNoise | None = None
        if self.attack is not None and self.rate is not None:
            kind = WordSwap if self.attack == "word-swap" else GaussianNoise
            attack = kind(self.rate, self.seed or 0)
        return evaluate(self.opened(checkpoint), self.split, attack=attack)


@command(
    "compare",
    "polyad compare runs/quickstart/run --with runs/quickstart/run/checkpoints/step-00000100",
)
@dataclass(frozen=True, kw_only=True)
class Compare(SplitOptions):
    """Compares the routing of two checkpoints.

    For each layer: the fraction of tokens that are sent to different experts, and the ratio of the
    routing entropies.

    Args:
        with_ (CHECKPOINT_OR_RUN): the checkpoint to compare with (for a run, its newest).
    """

    with_: Path
    tokens: Tokens = None

    def chosen(self, choose: Callable[[Path], Path]) -> Self:
        """Returns the same with both checkpoints as rank 0 chooses them."""
        from polyad.parallel.checkpoint.load import chosen_by_main, newest_of

        other = chosen_by_main(self.with_, newest_of)
        return replace(super().chosen(choose), with_=other)

    def measured(self, checkpoint: Path) -> tuple[object, str]:
        """Returns the comparison."""
        from polyad.parallel.checkpoint.load import read_newest
        from polyad.train.measures.comparison import Comparison
        from polyad.train.measures.measure import examine

        opened, options = self.opened(checkpoint), self.options()
        del options["with_"]
        result = read_newest(
            self.with_,
            lambda other: examine(opened, Comparison(other=other, **options), self.split),
        )
        return result, result.text()


@command("robustness", "polyad robustness runs/quickstart/run --set a --images imagenet-a")
@dataclass(frozen=True, kw_only=True)
class Robustness(DataOptions):
    """Scores an ImageNet model on ImageNet-C, -A, -R or -O.

    Args:
        set: letter of the benchmark.
        images (IMAGES): the benchmark's folder.
    """

    measure = "robustness"

    set: Literal["c", "a", "r", "o"]
    images: str
    weights: Weights = "trained"
    base: Base = None

    def options(self) -> dict[str, Any]:
        """The benchmark's name and folder."""
        from polyad.data.errors import user_path

        return {"set": self.set, "folder": user_path(self.images)}


@command(
    "report",
    "polyad report runs/quickstart/run",
    "polyad report runs/quickstart/run --layers 0,3 --experts 2,5 --top 12 --output page.html",
)
def report(
    path: AnyWeights,
    *,
    output: Path | None = None,
    data: Data = None,
    split: Split = "validation",
    layers: Names = (),
    experts: Names = (),
    top: Positive = 8,
    tokens: NonNegative | None = None,
    tokenizer: TokenizerFile = None,
    knockout: bool = False,
    json: Json = None,
) -> None:
    """Writes an HTML page about a run: experts, load, curves.

    Args:
        path (RUN): folder of a run, finished or not, which is read with its best checkpoint if it
            keeps it, otherwise with the newest; one of its checkpoints; a folder of weights; or
            the .parquet file of polyad experts trace, without its model.
        output (FILE): the page to write; default: report.html in the folder of the run.
        layers: blocks whose experts are shown, or all; default: the first, middle and last block
            with experts.
        experts: experts to show in each block, written LEVEL.N in a hierarchy; default: eight,
            spread evenly over the order by share.
        top (K): number of tokens or images to show per expert; default 8.
        tokens: approximate number of tokens to read, spread evenly over the split; 0 reads none;
            default 250000, or all for labelled sequences.
        knockout: for text: also show the change in loss without each expert, over about 65536
            tokens; takes a few times as long as reading these tokens once per expert shown.
    """
    from polyad.train.report.command import report

    if output is not None:
        check_result_file("--output", output)
    with results(json) as show:
        result = report(
            path,
            output=output,
            data=data,
            split=split,
            layers=layers,
            experts=tuple(dict.fromkeys(experts)),
            top=top,
            tokens=tokens,
            tokenizer=tokenizer,
            knockout=knockout,
        )
        show(result, f"report  {result['output']}")
