"""Commands that read a checkpoint over held-out data: its scores, a run as a page, and its experts.

Each runs in one process, or in each process that torchrun has started; rank 0 shows the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from polyad.launch.command import (
    Argument,
    Command,
    Json,
    Names,
    NonNegative,
    Overrides,
    Positive,
    Share,
    UsageError,
    check_result_file,
    command,
    names,
    refuse_others,
    results,
)
from polyad.launch.commands.options import (
    AnyWeights,
    Base,
    CheckpointOptions,
    CheckpointOrRun,
    Data,
    DataOptions,
    Split,
    SplitOptions,
    TokenizerFile,
    Tokens,
    Weights,
)

if TYPE_CHECKING:
    from polyad.train.reading import EvaluationContext


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


@command("experts specialize", "polyad experts specialize runs/quickstart/run")
@dataclass(frozen=True, kw_only=True)
class Specialize(CheckpointOptions):
    """Shows how experts divide the work.

    Reports the entropies of the routing and how much an expert reveals about the class (for text,
    the class of a token); for images also for how many classes each expert matters, by removing it.
    Of a trace, a .parquet file, what can be counted without the model.
    """

    measure = "specialize"

    tokenizer: TokenizerFile = None

    def run(self) -> None:
        """Shows the result, of a trace without its model."""
        if self.path.suffix != ".parquet":
            if self.tokenizer is not None:
                raise UsageError("--tokenizer: allowed with a trace alone")
            super().run()
            return
        refuse_others(self, "a trace, which has no model", {"path", "tokenizer", "json"})
        from polyad.train.measures.routes import specialization_of_trace

        with results(self.json) as show:
            result = specialization_of_trace(self.path, self.tokenizer)
            show(result, result.text())


@command(
    "experts steer",
    "polyad experts steer runs/quickstart/run --intervene layer=3,expert=2,how=steer,value=8",
)
@dataclass(frozen=True, kw_only=True)
class SteerExperts(CheckpointOptions):
    """Shows what a language model predicts when --intervene steers it or changes experts.

    Reports the change in loss and in predicted probability, for the token classes of `polyad
    experts atlas`.
    """

    measure = "steer"

    tokens: Tokens = None

    def opened(self, checkpoint: Path) -> "EvaluationContext":
        """Opens a checkpoint, whose model is read as it is first."""
        return super().opened(checkpoint)._replace(interventions=())

    def options(self) -> dict[str, Any]:
        """The options of the analysis, which reads once more with the changes."""
        from polyad.train.experts.interventions import parse_intervention

        return super().options() | {
            "changes": [parse_intervention(each) for each in self.intervene]
        }


@command(
    "experts atlas",
    "polyad experts atlas runs/quickstart/run",
    "polyad experts atlas runs/quickstart/run --tokens 16384 --how renormalize",
    "polyad experts atlas runs/quickstart/run --layers 1 --experts 2,3",
)
@dataclass(frozen=True, kw_only=True)
class Atlas(CheckpointOptions):
    """Shows what each expert of a language model is for, by removing it.

    Reports the change in loss without each expert, for classes of tokens by characters, position
    and frequency, next to its frequency of use, norms, REAP and MoNE; and what is lost when a
    quarter or half of a layer's experts are removed, chosen by each of these or at random.

    Args:
        how: how an expert is removed: zero: its output becomes 0; renormalize: as well,
            and the others take over its weight; mean: its output becomes its mean; prune: the
            router no longer has it, and the next best expert enters; default zero.
        layers: blocks whose experts are removed; default: all.
        experts: experts to remove in each of these blocks, written LEVEL.N in a hierarchy;
            default: all.
    """

    measure = "atlas"

    how: Literal["zero", "renormalize", "mean", "prune"] = "zero"
    layers: Names = ("all",)
    experts: Names = ()
    tokens: Tokens = None


@command(
    "experts trace",
    "polyad experts trace runs/quickstart/run --output runs/trace.parquet",
    "polyad experts trace runs/quickstart/run --output runs/trace-of-1.parquet "
    "--layers 1 --tokens 4096 --with score,entropy,norm,loss",
    "polyad experts trace runs/quickstart/run --text 'def main():' --html runs/main.html",
)
@dataclass(frozen=True, kw_only=True)
class Trace(CheckpointOptions):
    """Writes the experts of every token to Parquet, or those of a typed text as a page.

    There is one row per token, layer and chosen expert, with the expert's weight and the token's
    position in the data. pandas, polars and duckdb can read the file.

    Args:
        output (FILE): the Parquet file to write; with several processes a folder that gets one file
            of each.
        routes (FILE): in place of a checkpoint, the routes that an inference server returned: JSON
            or .jsonl with token_ids and routed_experts [tokens][layers][experts] of each text, or
            a .npy of these beside its .tokens.npy.
        text: with --html: read this text instead of held-out data.
        html (FILE): write a page that shows the loss, the experts and the next tokens of each
            token of --text, before and after --intervene.
        layers: blocks whose experts are written; default: all blocks with experts.
        top (K): for a muMoE or a mixture of networks, where every token uses all experts: how many
            to write, the highest weights of each level; default 4.
        with_ (COLUMN,...): additional columns: score (the value that top-K selection compares),
            entropy (of the token's scores, in nats), norm (of the expert's own output), loss (of
            the next token, in nats).
    """

    measure = "trace"

    path: CheckpointOrRun = field(kw_only=False, default=None)  # type: ignore[assignment]
    overrides: Overrides = field(kw_only=False, default=())  # type: ignore[arg-type]
    output: Path | None = None
    routes: Path | None = None
    text: str | None = None
    html: Path | None = None
    tokenizer: TokenizerFile = None
    layers: Names = ()
    top: Positive | None = None
    with_: Annotated[Sequence[str], Argument(parse=names)] = ()
    tokens: Tokens = None

    def options(self) -> dict[str, Any]:
        """The options of the analysis."""
        options = super().options()
        return options | {"extra": options.pop("with_")}

    def run(self) -> None:
        """Writes the page of a text, or the experts of held-out data or of routes."""
        if (self.path is None) == (self.routes is None):
            raise UsageError("experts trace: either a checkpoint or --routes is needed")
        if self.routes is not None:
            self._trace_routes(self.routes)
            return
        is_page = self.html is not None
        if (self.text is not None) != is_page or (self.output is None) != is_page:
            raise UsageError("experts trace: either --output, or --text and --html are needed")
        if self.html is None or self.text is None:
            if self.tokenizer is not None:
                raise UsageError("--tokenizer: allowed with --text alone")
            super().run()
            return
        shown = {"path", "text", "html", "intervene", "top", "tokenizer"}
        refuse_others(self, "--html", {*shown, "best", "weights", "base"})
        check_result_file("--html", self.html, (".html",))
        from polyad.data.files import write_whole
        from polyad.train.experts.trace import TOP
        from polyad.train.loading import load

        run = load(
            self.path,
            weights=self.weights,
            best=self.best,
            tokenizer=self.tokenizer,
            base=self.base,
        )
        page = run.show(self.text, interventions=self.intervene, top=self.top or TOP).page()
        write_whole(self.html, page)

    def _trace_routes(self, routes: Path) -> None:
        refuse_others(self, "--routes", {"routes", "output", "tokenizer", "json"})
        if self.output is None:
            raise UsageError("--routes: needs --output")
        from polyad.train.measures.routes import trace_of_routes

        with results(self.json) as show:
            result = trace_of_routes(routes, self.output, self.tokenizer)
            show(result, result.text())


@command(
    "experts prune",
    "polyad experts prune runs/quickstart/run runs/smaller --by reap --keep 0.5",
    "polyad experts prune runs/quickstart/run runs/joined --by frequency --keep 0.5 --merge",
)
@dataclass(frozen=True, kw_only=True)
class Prune(CheckpointOptions):
    """Writes a sparse mixture with fewer experts, and reports what that costs.

    Compares the loss on held-out text with that of all experts, and of randomly chosen ones.

    Args:
        output (OUTPUT): folder to create, in the same format.
        by: how to choose the experts that stay: by the change in loss without each (atlas; one
            pass per expert), by a statistic of their use and outputs, or by the mean probability
            that the router gives them.
        keep: fraction of the experts of every layer to keep, below 1.
        merge: merge experts with similar mean outputs, weighted by --by, instead of removing
            experts.
        calibrate (DIR): prepared data whose train split is used to choose the experts, such as
            examples of one domain; default: the data on which the cost is measured.
    """

    measure = "prune"

    output: Path = field(kw_only=False)
    by: Literal["atlas", "reap", "mone", "frequency", "probability"]
    keep: Share
    merge: bool = False
    calibrate: str | None = None
    tokens: Tokens = None


@command(
    "experts splice",
    "polyad train configs/quickstart/gpt2.yaml data.path=runs/stdlib run.folder=runs/spliced "
    "distill.teacher=runs/quickstart/dense distill.blocks=normalized "
    "model.replaced='{blocks: [1], feed_forward: {kind: dense, hidden_size: 512}}'",
    "polyad experts splice runs/spliced",
)
@dataclass(frozen=True, kw_only=True)
class Splice(CheckpointOptions):
    """Measures how well replaced feed-forwards (model.replaced) stand in for the original ones.

    Reports the loss with the original feed-forwards, without any and with the replaced ones, in
    each of these blocks and in all together; how far their outputs are from the original ones; and
    how many experts are active.

    Args:
        teacher: the original model: a run, checkpoint or folder of weights; default: the run's
            distill.teacher, at the step from which distillation started.
    """

    measure = "splice"

    teacher: Path | None = None
    tokens: Tokens = None


@command(
    "experts rewrite",
    "polyad experts rewrite runs/quickstart/run --move class=Young,of=Young:0+Male:0",
)
@dataclass(frozen=True, kw_only=True)
class Rewrite(CheckpointOptions):
    """Edits the output for one attribute through its experts, in a model with a muMoE head.

    Reports accuracy and fairness before and after.

    Args:
        move (class=C,of=A+B,by=N): the attribute C whose output is moved, in proportion to an
            image's use of the experts that training images of a subpopulation use (for example
            of=Young:0+Male:0); by: the factor, default: the number of experts.
    """

    measure = "rewrite"

    move: str


def measure_of_plugin(name: str) -> Command:
    """The command of a measure that a plugin has registered.

    Args:
        name: of the measure.
    """

    @dataclass(frozen=True, kw_only=True)
    class PluginMeasure(CheckpointOptions):
        """Computes a measure of experts on held-out data."""

        measure = name

    return command(f"experts {name}", f"polyad experts {name} runs/quickstart/run")(PluginMeasure)
