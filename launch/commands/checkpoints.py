"""`polyad checkpoint`: the checkpoints of a run are listed, verified and deleted."""

from pathlib import Path
from typing import Annotated

from polyad.launch.command import Argument, Json, command
from polyad.launch.output import results

Folder = Annotated[Path, Argument("a run, its checkpoints folder, or one checkpoint", "FOLDER")]


@command("checkpoint list", "polyad checkpoint list runs/quickstart/run")
def checkpoint_list(folder: Folder, *, json: Json = None) -> None:
    """Lists the checkpoints of a run with step and size, and marks damaged ones."""
    from polyad.launch.stored import list_checkpoints

    with results(json) as show:
        result = list_checkpoints(folder)
        show(result, result.text())


@command(
    "checkpoint verify",
    "polyad checkpoint verify runs/quickstart/run --json -",
    "polyad checkpoint verify runs/quickstart/run/checkpoints/step-00000100",
)
def checkpoint_verify(folder: Folder, *, json: Json = None) -> int:
    """Verifies checkpoints by reading every byte; exit status 2 if one is damaged."""
    from polyad.launch.stored import verify_checkpoints

    with results(json) as show:
        result = verify_checkpoints(folder)
        show(result, result.text())
    return 0 if result.good else 2


@command(
    "checkpoint delete",
    "polyad checkpoint delete runs/quickstart/run/checkpoints/step-00000100",
)
def checkpoint_delete(
    folders: Annotated[
        list[Path], Argument("a checkpoint: .../step-NNNNNNNN", "FOLDER", nargs="+")
    ],
    *,
    even_the_last_good: Annotated[
        bool, Argument("delete even if that leaves the run without a good checkpoint")
    ] = False,
    json: Json = None,
) -> None:
    """Deletes checkpoints, except the last good one of a run."""
    from polyad.launch.stored import delete_checkpoints

    with results(json) as show:
        result = delete_checkpoints(folders, even_the_last_good=even_the_last_good)
        show(result, result.text())
