"""`polyad report`: a run as a page."""

from pathlib import Path

from polyad.launch.command import Json, Names, NonNegative, Positive, command
from polyad.launch.commands.options import AnyWeights, Data, Split
from polyad.launch.output import check_result_file, results


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
    knockout: bool = False,
    json: Json = None,
) -> None:
    """Writes an HTML page about a run: experts, load, curves.

    Args:
        path (RUN): folder of a run, finished or not, which is read with its best checkpoint if it
            keeps it, otherwise with the newest; one of its checkpoints; or a folder of weights.
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
    from polyad.launch.machine import prepare_environment

    prepare_environment()
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
            knockout=knockout,
        )
        show(result, f"report  {result['output']}")
