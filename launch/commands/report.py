"""`polyad report`: a run as a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from polyad.launch.command import Argument, Json, command, non_negative, positive
from polyad.launch.commands.options import Data, Split, Stream, numbers
from polyad.launch.output import results


@command(
    "report",
    "polyad report runs/quickstart/run",
    "polyad report runs/quickstart/run --layers 0,3 --experts 2,5 --top 12 --output page.html",
)
def report(
    run: Annotated[
        Path, Argument("the folder of a run, finished or not, or a folder of weights", "RUN")
    ],
    other: Annotated[
        Path | None,
        Argument(
            "a second run of the same data, drawn beside it: curves over one another, and experts "
            "that get the same tokens side by side",
            "RUN2",
            nargs="?",
        ),
    ] = None,
    *,
    output: Annotated[
        Path | None, Argument("the page; default: report.html in that folder", "FILE")
    ] = None,
    checkpoint: Annotated[
        int | None,
        Argument(
            "weights to read the data with; default: the best of a run with "
            "checkpoint.keep_best, else the newest",
            "STEP",
            non_negative,
        ),
    ] = None,
    best: Annotated[
        bool,
        Argument(
            "only the checkpoint of the best validation will do, of a run with checkpoint.keep_best"
        ),
    ] = False,
    data: Data = None,
    split: Split = "validation",
    layers: Annotated[
        Sequence[str],
        numbers(
            "blocks whose experts are shown, or all; default: the first, the middle and the last "
            "block that has experts"
        ),
    ] = (),
    experts: Annotated[
        Sequence[str],
        numbers(
            "experts shown of each block; with levels LEVEL.N; default: six, by how often they "
            "have a token and by load"
        ),
    ] = (),
    top: Annotated[
        int,
        Argument(
            "tokens shown of each expert, and samples with the largest loss; default 8",
            "K",
            positive,
        ),
    ] = 8,
    tokens: Annotated[
        int | None,
        Argument(
            "about how many tokens are read, evenly over the split; 0 reads none; default 250000, "
            "of labelled sequences all",
            "N",
            non_negative,
        ),
    ] = None,
    knockout: Annotated[
        bool,
        Argument(
            "of text: show of each expert also the change of the loss without it, of about 65536 "
            "tokens; takes a few times as long as reading them once for each expert shown"
        ),
    ] = False,
    stream: Stream = None,
    json: Json = None,
) -> None:
    """Draws a run as a page: curves, expert load, the tokens each expert gets most of."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.train.report.command import report, report_line

    with results(json) as show:
        result = report(
            run,
            other,
            output=output,
            checkpoint=checkpoint,
            best=best,
            data=data,
            split=split,
            layers=layers,
            experts=experts,
            top=top,
            tokens=tokens,
            knockout=knockout,
            stream=stream,
        )
        show(result, report_line(result))
