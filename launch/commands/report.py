"""`polyad report`: a run as a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from polyad.launch.command import Argument, Json, command, non_negative, positive
from polyad.launch.commands.options import Data, Split, numbers
from polyad.launch.output import results


@command(
    "report",
    "polyad report runs/quickstart/run",
    "polyad report runs/quickstart/run --layers 0,3 --experts 2,5 --top 12 --output page.html",
)
def report(
    run: Annotated[
        Path, Argument("folder of a run, finished or not, or a folder of weights", "RUN")
    ],
    *,
    output: Annotated[
        Path | None,
        Argument("the page to write; default: report.html in the folder of the run", "FILE"),
    ] = None,
    checkpoint: Annotated[
        int | None,
        Argument(
            "step of the checkpoint with which the data is read; default: the best one for a run "
            "with checkpoint.keep_best, otherwise the newest",
            "STEP",
            non_negative,
        ),
    ] = None,
    best: Annotated[
        bool,
        Argument(
            "require the checkpoint with the best validation score, for a run with "
            "checkpoint.keep_best"
        ),
    ] = False,
    data: Data = None,
    split: Split = "validation",
    layers: Annotated[
        Sequence[str],
        numbers(
            "blocks whose experts are shown, or all; default: the first, middle and last block "
            "with experts"
        ),
    ] = (),
    experts: Annotated[
        Sequence[str],
        numbers(
            "experts to show in each block, written LEVEL.N in a hierarchy; default: eight, spread "
            "evenly over the order by share"
        ),
    ] = (),
    top: Annotated[
        int,
        Argument(
            "number of tokens or images to show per expert; default 8",
            "K",
            positive,
        ),
    ] = 8,
    tokens: Annotated[
        int | None,
        Argument(
            "approximate number of tokens to read, spread evenly over the split; 0 reads none; "
            "default 250000, or all for labelled sequences",
            "N",
            non_negative,
        ),
    ] = None,
    knockout: Annotated[
        bool,
        Argument(
            "for text: also show the change in loss without each expert, over about 65536 tokens; "
            "takes a few times as long as reading these tokens once per expert shown"
        ),
    ] = False,
    json: Json = None,
) -> None:
    """Writes an HTML page about a run: what each expert does, expert load, loss curves."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.train.report.command import report, report_line

    with results(json) as show:
        result = report(
            run,
            output=output,
            checkpoint=checkpoint,
            best=best,
            data=data,
            split=split,
            layers=layers,
            experts=tuple(dict.fromkeys(experts)),
            top=top,
            tokens=tokens,
            knockout=knockout,
        )
        show(result, report_line(result))
