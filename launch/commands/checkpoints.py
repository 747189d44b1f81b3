"""`polyad checkpoint`: the checkpoints of a run are listed and verified."""

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
