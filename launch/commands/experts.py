"""Commands that look at the experts of a checkpoint, remove them or put others in their place.

Each runs in one process, or in each process that torchrun has started; rank 0 shows the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from polyad.launch.command import (
    Argument,
    Command,
    Names,
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
    CheckpointOptions,
    CheckpointOrRun,
    TokenizerFile,
    Tokens,
)

if TYPE_CHECKING:
    from polyad.train.reading import EvaluationContext


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
