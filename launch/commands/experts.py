"""Commands that look at the experts of a checkpoint, over held-out data.

Each runs in one process, or in each process that torchrun has started; rank 0 shows the result.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from polyad.launch.command import (
    Argument,
    Overrides,
    UsageError,
    command,
    names,
    non_negative,
    positive,
    share,
    shares,
)
from polyad.launch.commands.held_out import (
    READ,
    Found,
    Stored,
    examined,
    measure_named,
    show_measured,
)
from polyad.launch.commands.options import (
    CheckpointOrRun,
    numbers,
    steering,
)


@command("experts specialize", "polyad experts specialize runs/quickstart/run")
def specialize(
    path: CheckpointOrRun,
    overrides: Overrides,
    held: Stored,
) -> None:
    """Shows how experts divide the work.

    Entropies of the gates, and what experts tell about classes, of text about classes of tokens;
    of images also for how many classes each expert matters, by leaving it out.
    """
    asked = {"overrides": overrides}
    show_measured(
        "experts specialize", path, held, asked, measure_named("specialization", held, overrides)
    )


Layers = Annotated[
    Sequence[str],
    numbers(
        "blocks whose experts are left out, or all; default: the first, the middle and the last "
        "block that has experts"
    ),
]
Experts = Annotated[
    Sequence[str],
    numbers("experts of each of these that are left out; with levels LEVEL.N; default: all"),
]


Labels = Annotated[
    Path | None,
    Argument(
        "classes of your own: a .parquet or .csv with the columns document and offset, as experts "
        "trace writes them, and others whose values sort the tokens",
        "FILE",
    ),
]


@command("experts knockout", "polyad experts knockout runs/quickstart/run --layers 0,3")
def knockout(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    layers: Layers = (),
    experts: Experts = (),
    tokens: Annotated[int | None, Argument(READ, "N", positive)] = None,
    labels: Labels = None,
    held: Stored,
) -> None:
    """Shows what each expert of a language model is for, by leaving it out.

    The change of the loss without it, for classes of tokens by characters, position and frequency.
    """
    asked = {"overrides": overrides, "layers": layers, "experts": experts, "tokens": tokens}
    _knock_out("experts knockout", path, held, asked | {"labels": labels})


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
            "an expert's output is 0; the others take over its weight; its output is its mean; it "
            "is not there and the next best enters; default contribution"
        ),
    ] = "contribution",
    layers: Annotated[
        Sequence[str], numbers("blocks whose experts are taken away; default: all")
    ] = ("all",),
    experts: Experts = (),
    unembed: Annotated[
        int | None,
        Argument("tell the N tokens that each expert's mean output raises most", "N", positive),
    ] = None,
    tokens: Annotated[int | None, Argument(READ, "N", positive)] = None,
    labels: Labels = None,
    held: Stored,
) -> None:
    """Shows what every expert is for, by taking it away, and which statistics would have told.

    The change of the loss, for classes of tokens, beside use, norms, REAP and MoNE; and what is
    lost without a quarter and a half of a layer's experts, chosen by each of these or at random.
    """
    asked: dict[str, Any] = {"layers": layers, "experts": experts, "how": how}
    asked |= {"labels": labels, "unembed": unembed}
    asked |= {} if tokens is None else {"tokens": tokens}

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.atlas import Atlas

        return examined(checkpoint, Atlas, held, overrides, **asked)

    show_measured("experts atlas", path, held, {"overrides": overrides} | asked, measure)


@command(
    "experts audit",
    "polyad experts audit runs/quickstart/run",
    "polyad experts audit runs/quickstart/run --positions 1000 --how route-around",
)
def audit(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    how: Annotated[
        Literal["contribution", "route-around"],
        Argument(
            "an expert's output is 0; the others take over its weight too; default contribution"
        ),
    ] = "contribution",
    positions: Annotated[
        int | None, Argument("tokens that are audited in each layer; default 200", "N", positive)
    ] = None,
    layers: Annotated[Sequence[str], numbers("blocks that are audited; default: all")] = ("all",),
    tokens: Annotated[int | None, Argument(READ, "N", positive)] = None,
    seed: Annotated[int, Argument("of random choices; default 0", "S", non_negative)] = 0,
    held: Stored,
) -> None:
    """Tests whether a statistic tells which of a token's experts matter to it.

    The loss of single tokens without the highest and without the lowest of their experts, by use,
    norms, REAP, MoNE, the token's own weight, and chance.
    """
    asked: dict[str, Any] = {"how": how, "layers": layers, "seed": seed}
    asked |= {} if tokens is None else {"tokens": tokens}
    asked |= {} if positions is None else {"positions": positions}

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.audit import Audited

        return examined(checkpoint, Audited, held, overrides, **asked)

    show_measured("experts audit", path, held, {"overrides": overrides} | asked, measure)


@command(
    "experts probe",
    "polyad experts probe runs/quickstart/run",
    "polyad experts probe runs/quickstart/run --layers all --units 1,4,16 --candidates 16",
)
def probe(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    layers: Annotated[
        Sequence[str],
        numbers(
            "blocks that are probed, or all; default: the first, the middle and the last whose "
            "feed-forward is dense or selects experts"
        ),
    ] = (),
    units: Annotated[Sequence[str], numbers("how many hidden units a probe reads; default 1,8")] = (
        "1",
        "8",
    ),
    samples: Annotated[
        int,
        Argument(
            "tokens of each probe, half of them of the class, a multiple of 8; default 400",
            "N",
            positive,
        ),
    ] = 400,
    candidates: Annotated[
        int, Argument("experts of each layer that are probed; default 8", "N", positive)
    ] = 8,
    tokens: Annotated[int | None, Argument(READ, "N", positive)] = None,
    seed: Annotated[int, Argument("of random choices; default 0", "S", non_negative)] = 0,
    held: Stored,
) -> None:
    """Tests which classes of tokens a few hidden units of an expert tell.

    k-sparse probes, each on as many tokens, the best of as many experts of each layer, chosen on
    other tokens than it is scored on, beside probes of shuffled labels.
    """
    asked: dict[str, Any] = {"layers": layers, "units": units, "samples": samples}
    asked |= {"candidates": candidates, "seed": seed}
    asked |= {} if tokens is None else {"tokens": tokens}

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.ksparse import KSparse

        return examined(checkpoint, KSparse, held, overrides, **asked)

    show_measured("experts probe", path, held, {"overrides": overrides} | asked, measure)


@command(
    "experts prune",
    "polyad experts prune runs/quickstart/run runs/smaller --by reap --keep 0.5",
    "polyad experts prune runs/quickstart/run runs/joined --by frequency --keep 0.5 --merge",
)
def prune(
    path: CheckpointOrRun,
    output: Annotated[Path, Argument("the folder to make, in the same format", "OUTPUT")],
    overrides: Overrides,
    *,
    by: Annotated[
        Literal["atlas", "reap", "mone", "frequency", "probability", "mean-norm", "random"],
        Argument(
            "what decides which experts stay: the change of the loss without each (one pass for "
            "each expert), a statistic of use and outputs, the mean probability that the router "
            "gives them, or chance"
        ),
    ],
    keep: Annotated[
        float, Argument("the share of the experts of every layer that stays, below 1", "S", share)
    ],
    merge: Annotated[
        bool,
        Argument(
            "experts with similar mean outputs become one, with weights in proportion to what --by "
            "says of each, in place of leaving experts out"
        ),
    ] = False,
    calibrate: Annotated[
        str | None,
        Argument(
            "prepared data on whose train split experts are chosen, such as examples of one "
            "domain; default: that which the cost is measured on",
            "DIR",
        ),
    ] = None,
    tokens: Annotated[int | None, Argument(READ, "N", positive)] = None,
    seed: Annotated[int, Argument("of random choices; default 0", "S", non_negative)] = 0,
    held: Stored,
) -> None:
    """Writes a sparse mixture with fewer experts, and says what that cost.

    Beside the loss on held-out text with all experts, and with random ones.
    """
    asked: dict[str, Any] = {"output": output, "by": by, "keep": keep, "merge": merge}
    asked |= {"calibrate": calibrate, "seed": seed}
    asked |= {} if tokens is None else {"tokens": tokens}

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.removal import Removal

        return examined(checkpoint, Removal, held, overrides, **asked)

    show_measured("experts prune", path, held, {"overrides": overrides} | asked, measure)


@command(
    "experts subset",
    "polyad experts subset runs/quickstart/run --keep 0.5,0.25",
    "polyad prepare --source configs --format text --tokenizer runs/stdlib --output runs/domain",
    "polyad experts subset runs/quickstart/run --data runs/domain --keep 0.5 --examples 1024",
)
def subset(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    keep: Annotated[
        Sequence[float],
        Argument("shares of the experts of every layer that stay, each below 1", "S,...", shares),
    ],
    by: Annotated[
        Literal["atlas", "reap", "mone", "frequency", "probability", "mean-norm", "random"],
        Argument(
            "what decides which experts stay, as in experts prune; default probability: the mean "
            "over the examples' tokens of what the router gives each"
        ),
    ] = "probability",
    calibrate: Annotated[
        str | None,
        Argument(
            "prepared data on whose train split experts are chosen; default: that which is scored",
            "DIR",
        ),
    ] = None,
    examples: Annotated[
        int | None,
        Argument("about how many tokens are read to choose; default 4,096", "N", positive),
    ] = None,
    tokens: Annotated[int | None, Argument(READ, "N", positive)] = None,
    seed: Annotated[int, Argument("of random choices; default 0", "S", non_negative)] = 0,
    held: Stored,
) -> None:
    """Shows what is lost where only the experts stay that a domain's examples choose.

    The loss on its held-out text (--data) at each share, beside the whole model and random experts.
    """
    asked: dict[str, Any] = {"keep": keep, "by": by, "calibrate": calibrate, "seed": seed}
    asked |= {} if examples is None else {"examples": examples}
    asked |= {} if tokens is None else {"tokens": tokens}

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.subset import Subsetting

        return examined(checkpoint, Subsetting, held, overrides, **asked)

    show_measured("experts subset", path, held, {"overrides": overrides} | asked, measure)


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
            "X times the expert's gate column is added to what enters a block (level=N of a "
            "hierarchy); may be given several times, all act at once; leaves out these experts "
            "alone unless --layers or --experts names others"
        ),
    ],
    layers: Layers = (),
    experts: Experts = (),
    tokens: Annotated[int | None, Argument(READ, "N", positive)] = None,
    held: Stored,
) -> None:
    """Shows what a language model predicts when it is steered to experts.

    The change of the loss, and of the predicted probability, for the classes of tokens of
    `polyad experts knockout`, beside what leaving the experts out does.
    """
    asked = {"overrides": overrides, "layers": layers, "experts": experts, "tokens": tokens}
    _knock_out("experts steer", path, held, asked | {"steer": steer})


def _knock_out(name: str, path: Path, held: Stored, asked: dict[str, Any]) -> None:
    from polyad.train.experts.steering import parse_steering

    given = {name: asked.get(name) for name in ("layers", "experts", "labels")}
    given["steerings"] = [parse_steering(text) for text in asked.get("steer", ())]
    if asked["tokens"] is not None:
        given["tokens"] = asked["tokens"]
    show_measured(
        name, path, held, asked, measure_named("knockout", held, asked["overrides"], **given)
    )


@command(
    "experts contrast",
    "polyad prepare --source configs --format text --tokenizer runs/stdlib --output runs/yaml",
    "polyad experts contrast runs/quickstart/run --with runs/yaml --force 5 --avoid 2",
)
def contrast(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    other: Annotated[str, Argument("prepared data of the second text", "DIR", flag="--with")],
    force: Annotated[
        int,
        Argument(
            "how many experts are forced that the first text uses more; default 5",
            "N",
            non_negative,
        ),
    ] = 5,
    avoid: Annotated[
        int,
        Argument(
            "how many experts are avoided that the second text uses more; default 0",
            "N",
            non_negative,
        ),
    ] = 0,
    strength: Annotated[
        float | None,
        Argument(
            "steer by the same experts' gate columns too, X times each, and beside it (see experts "
            "steer)",
            "X",
        ),
    ] = None,
    tokens: Annotated[int | None, Argument(READ, "N", positive)] = None,
    seed: Annotated[int, Argument("of random choices; default 0", "S", non_negative)] = 0,
    held: Stored,
) -> None:
    """Shows which experts one text uses more than another, and what forcing them does.

    The loss of both texts, beside that with random experts in the same number.
    """
    asked: dict[str, Any] = {"force": force, "avoid": avoid, "strength": strength, "seed": seed}
    asked |= {} if tokens is None else {"tokens": tokens}

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.contrast import Contrasting

        return examined(checkpoint, Contrasting, held, overrides, other=other, **asked)

    show_measured(
        "experts contrast", path, held, {"overrides": overrides, "with": other} | asked, measure
    )


@command(
    "experts trace",
    "polyad experts trace runs/quickstart/run --output runs/trace.parquet",
    "polyad experts trace runs/quickstart/run --output runs/trace.parquet --tokens 4096 "
    "--layers 1 --with score,entropy,norm,loss",
)
def trace(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    output: Annotated[
        Path,
        Argument(
            "the file to make, which ends in .parquet, or a folder with one for each process",
            "DIR_OR_FILE",
        ),
    ],
    layers: Annotated[
        Sequence[str], numbers("blocks whose experts are written; default: all layers with experts")
    ] = (),
    top: Annotated[
        int | None,
        Argument(
            "of a muMoE or a mixture of networks, which give a token a share of every expert: how "
            "many are written, of each level the highest; default 4",
            "K",
            positive,
        ),
    ] = None,
    extra: Annotated[
        Sequence[str],
        Argument(
            "more columns: score (what top-K sees), entropy (of a token's scores, in nats), norm "
            "(of the expert's own output), loss (of the next token, in nats)",
            "COLUMN,...",
            names,
            flag="--with",
        ),
    ] = (),
    tokens: Annotated[int | None, Argument(READ, "N", positive)] = None,
    held: Stored,
) -> None:
    """Writes the experts of every token to Parquet.

    A row for each token, layer and chosen expert, with the expert's weight and the token's place in
    the data; pandas, polars and duckdb read it.
    """
    options: dict[str, Any] = {"output": output, "layers": layers, "top": top, "extra": extra}
    if tokens is not None:
        options["tokens"] = tokens

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.trace import Trace, TraceWithLoss

        kind = TraceWithLoss if "loss" in extra else Trace
        return examined(checkpoint, kind, held, overrides, **options)

    show_measured("experts trace", path, held, {"overrides": overrides, **options}, measure)


@command("experts measure", "polyad experts measure runs/quickstart/run --name specialization")
def take(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    name: Annotated[
        str, Argument("of the measure, which a plugin (POLYAD_PLUGINS) may have added", "NAME")
    ],
    held: Stored,
) -> None:
    """Takes a measure of experts over held-out data."""
    from polyad.train.measures.registry import MEASURES

    if name not in MEASURES:
        raise UsageError(f"--name: {name!r} is not allowed; {', '.join(MEASURES)} are")
    asked = {"overrides": overrides, "measure": name}
    show_measured("experts measure", path, held, asked, measure_named(name, held, overrides))


@command("experts rewrite", "polyad experts rewrite runs/quickstart/run --move class=1,of=Young:0")
def rewrite(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    move: Annotated[
        str,
        Argument(
            "the class whose output is moved by the experts that training images of a "
            "subpopulation use, as of=Young:0+Male:0; by: the number of experts, if it is missing",
            "class=C,of=A+B,by=N",
        ),
    ],
    held: Stored,
) -> None:
    """Moves a class's output by experts, in a model with a muMoE head.

    Accuracy and fairness before and after.
    """

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.rewriting import Rewriting

        return examined(checkpoint, Rewriting, held, overrides, move=move)

    show_measured("experts rewrite", path, held, {"overrides": overrides, "move": move}, measure)
