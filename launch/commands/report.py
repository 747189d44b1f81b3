"""`polyad report`: a run as a page."""

from pathlib import Path

from polyad.launch.command import Json, Names, NonNegative, Positive, command
from polyad.launch.commands.options import AnyWeights, Data, Split
from polyad.launch.output import results


@command(
    "report",
    "polyad report runs/quickstart/run",
    "polyad report runs/quickstart/run --layers 0,3 --experts 2,5 --top 12 --output page.html",
)
def report(
    run: AnyWeights,
    *,
    output: Path | None = None,
    checkpoint: NonNegative | None = None,
    best: bool = False,
    data: Data = None,
    split: Split = "validation",
    layers: Names = (),
    experts: Names = (),
    top: Positive = 8,
    tokens: NonNegative | None = None,
    knockout: bool = False,
    json: Json = None,
) -> None:
    """Writes an HTML page about a run: experts, load, curves.

    Args:
        run (RUN): folder of a run, finished or not, or a folder of weights.
        output (FILE): the page to write; default: report.html in the folder of the run.
        checkpoint (STEP): step of the checkpoint with which the data is read; default: the best one
            for a run with checkpoint.keep_best, otherwise the newest.
        best: require the checkpoint with the best validation score, for a run with
            checkpoint.keep_best.
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
