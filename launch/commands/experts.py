"""Commands that look at the experts of a checkpoint, over held-out data.

Each runs in one process, or in each process that torchrun has started; rank 0 shows the result.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from polyad.launch.command import (
    Argument,
    Command,
    Overrides,
    UsageError,
    command,
    names,
    positive,
)
from polyad.launch.commands.held_out import (
    Found,
    Stored,
    Tokens,
    examined,
    measure_named,
    show_measured,
)
from polyad.launch.commands.options import (
    CheckpointOrRun,
    TokenizerFile,
    numbers,
    steering,
)
from polyad.launch.output import check_result_file


@command("experts specialize", "polyad experts specialize runs/quickstart/run")
def specialize(
    path: CheckpointOrRun,
    overrides: Overrides,
    held: Stored,
) -> None:
    """Shows how experts divide the work.

    Reports the entropies of the routing and how much an expert reveals about the class (for text,
    the class of a token); for images also for how many classes each expert matters, by removing it.
    """
    asked = {"overrides": overrides}
    show_measured(
        "experts specialize", path, held, asked, measure_named("specialization", held, overrides)
    )


Layers = Annotated[
    Sequence[str],
    numbers(
        "blocks whose experts are removed, or all; default: the first, middle and last block with "
        "experts"
    ),
]
Experts = Annotated[
    Sequence[str],
    numbers(
        "experts to remove in each of these blocks, written LEVEL.N in a hierarchy; default: all"
    ),
]


@command("experts knockout", "polyad experts knockout runs/quickstart/run --layers 0,3")
def knockout(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    layers: Layers = (),
    experts: Experts = (),
    tokens: Tokens = None,
    held: Stored,
) -> None:
    """Shows what each expert of a language model is for, by removing it.

    Reports the change in loss without the expert, for classes of tokens by characters, position and
    frequency.
    """
    asked = {"overrides": overrides, "layers": layers, "experts": experts, "tokens": tokens}
    _knock_out("experts knockout", path, held, asked)


@command(
    "experts atlas",
    "polyad experts atlas runs/quickstart/run",
    "polyad experts atlas runs/quickstart/run --tokens 16384 --how route-around",
    "polyad experts atlas runs/quickstart/run --unembed 10",
)
def atlas(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    how: Annotated[
        Literal["contribution", "route-around", "mean", "prune"],
        Argument(
            "how an expert is removed: contribution: its output becomes 0; route-around: as well, "
            "and the others take over its weight; mean: its output becomes its mean; prune: the "
            "router no longer has it, and the next best expert enters; default contribution"
        ),
    ] = "contribution",
    layers: Annotated[Sequence[str], numbers("blocks whose experts are removed; default: all")] = (
        "all",
    ),
    experts: Experts = (),
    unembed: Annotated[
        int | None,
        Argument("list the N tokens that each expert's mean output promotes most", "N", positive),
    ] = None,
    tokens: Tokens = None,
    held: Stored,
) -> None:
    """Measures how much each expert matters, and which cheap statistics predict it.

    Reports the change in loss without each expert, for classes of tokens, next to its frequency of
    use, norms, REAP and MoNE; and what is lost when a quarter or half of a layer's experts are
    removed, chosen by each of these or at random.
    """
    asked: dict[str, Any] = {"layers": layers, "experts": experts, "how": how}
    asked |= {"unembed": unembed}
    asked |= {} if tokens is None else {"tokens": tokens}

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.atlas import Atlas

        return examined(checkpoint, Atlas, held, overrides, **asked)

    show_measured("experts atlas", path, held, {"overrides": overrides} | asked, measure)


@command(
    "experts steer",
    "polyad experts steer runs/quickstart/run --steer layer=3,expert=2,strength=8",
)
def steer(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    steer: Annotated[
        Sequence[str],
        steering(
            "add X times the expert's gate column to the input of a block (level=N of a "
            "hierarchy); may be repeated, and all act at once; the experts that are removed for "
            "comparison are these, unless --layers or --experts names others"
        ),
    ],
    layers: Layers = (),
    experts: Experts = (),
    tokens: Tokens = None,
    held: Stored,
) -> None:
    """Shows what a language model predicts when it is steered towards experts.

    Reports the change in loss and in predicted probability, for the token classes of `polyad
    experts knockout`, next to the effect of removing the experts.
    """
    asked = {"overrides": overrides, "layers": layers, "experts": experts, "tokens": tokens}
    _knock_out("experts steer", path, held, asked | {"steer": steer})


def _knock_out(name: str, path: Path, held: Stored, asked: dict[str, Any]) -> None:
    from polyad.train.experts.steering import parse_steering

    given = {name: asked.get(name) for name in ("layers", "experts")}
    given["steerings"] = [parse_steering(text) for text in asked.get("steer", ())]
    if asked["tokens"] is not None:
        given["tokens"] = asked["tokens"]
    show_measured(
        name, path, held, asked, measure_named("knockout", held, asked["overrides"], **given)
    )


@command(
    "experts trace",
    "polyad experts trace runs/quickstart/run --output runs/trace.parquet",
    "polyad experts trace runs/quickstart/run --output runs/trace.parquet --tokens 4096 "
    "--layers 1 --with score,entropy,norm,loss",
    "polyad experts trace runs/quickstart/run --text 'def main():' --html runs/main.html",
)
def trace(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    output: Annotated[
        Path | None,
        Argument(
            "the .parquet file to write, or a folder that gets one file per process",
            "DIR_OR_FILE",
            one_of="what is written",
        ),
    ] = None,
    text: Annotated[
        str | None, Argument("with --html: read this text instead of held-out data")
    ] = None,
    html: Annotated[
        Path | None,
        Argument(
            "write a page that shows the loss, the experts and the next tokens of each token of "
            "--text, before and after --intervene",
            "FILE",
            one_of="what is written",
        ),
    ] = None,
    tokenizer: TokenizerFile = None,
    layers: Annotated[
        Sequence[str], numbers("blocks whose experts are written; default: all blocks with experts")
    ] = (),
    top: Annotated[
        int | None,
        Argument(
            "for a muMoE or a mixture of networks, where every token uses all experts: how many "
            "to write, the highest weights of each level; default 4",
            "K",
            positive,
        ),
    ] = None,
    extra: Annotated[
        Sequence[str],
        Argument(
            "additional columns: score (the value that top-K selection compares), entropy (of the "
            "token's scores, in nats), norm (of the expert's own output), loss (of the next "
            "token, in nats)",
            "COLUMN,...",
            names,
            flag="--with",
        ),
    ] = (),
    tokens: Tokens = None,
    held: Stored,
) -> None:
    """Writes the experts of every token to Parquet, or those of a typed text as a page.

    There is one row per token, layer and chosen expert, with the expert's weight and the token's
    position in the data. pandas, polars and duckdb can read the file.
    """
    if (text is None) != (html is None) or (html is None and output is None):
        raise UsageError("experts trace: --output, or --text and --html are needed")
    if text is not None and html is not None:
        others = (overrides, layers, extra, tokens, held.data, held.json)
        if any(others) or held.split != "validation":
            raise UsageError(
                "--html: allowed beside --text, --intervene, --top, --tokenizer, --best, --weights "
                "and --base alone"
            )
        _trace_text(path, text, html, top, tokenizer, held)
        return
    if tokenizer is not None:
        raise UsageError("--tokenizer: allowed with --text alone")
    options: dict[str, Any] = {"output": output, "layers": layers, "top": top, "extra": extra}
    if tokens is not None:
        options["tokens"] = tokens

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.trace import Trace, TraceWithLoss

        kind = TraceWithLoss if "loss" in extra else Trace
        return examined(checkpoint, kind, held, overrides, **options)

    show_measured("experts trace", path, held, {"overrides": overrides, **options}, measure)


def _trace_text(
    path: Path, text: str, html: Path, top: int | None, tokenizer: str | None, held: Stored
) -> None:
    """Writes the page of a text."""
    from polyad.launch.machine import prepare_environment

    check_result_file("--html", html, (".html",))
    prepare_environment()
    from polyad.data.files import write_whole
    from polyad.train.experts.trace import TOP
    from polyad.train.loading import load

    run = load(path, weights=held.weights, best=held.best, tokenizer=tokenizer, base=held.base)
    write_whole(html, run.show(text, interventions=held.intervene, top=top or TOP).page())


def measure_of_plugin(name: str) -> Command:
    """The command of a measure that a plugin has registered.

    Args:
        name: of the measure.
    """

    @command(f"experts {name}", f"polyad experts {name} runs/quickstart/run")
    def take(path: CheckpointOrRun, overrides: Overrides, *, held: Stored) -> None:
        """Computes a measure of experts on held-out data."""
        asked = {"overrides": overrides}
        show_measured(f"experts {name}", path, held, asked, measure_named(name, held, overrides))

    return take
