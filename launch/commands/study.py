"""`polyad study`: variants of a run over several seeds, compared in pairs."""

from pathlib import Path
from typing import Annotated

from polyad.launch.command import Argument, Json, command
from polyad.launch.output import check_json_path, check_result_file, results, say


@command(
    "study",
    "polyad study configs/studies/mumoe.yaml --dry-run",
    "polyad study configs/studies/mumoe.yaml --dry-run --figure mumoe.pdf",
)
def study(
    study: Annotated[
        Path, Argument("a YAML file; run the same command again to continue a study", "STUDY")
    ],
    *,
    dry_run: Annotated[
        bool,
        Argument("start nothing; print what would be trained, and compare what is finished"),
    ] = False,
    figure: Annotated[
        Path | None, Argument("plot the comparison in FILE (.pdf, .svg or .png)", "FILE")
    ] = None,
    json: Json = None,
) -> None:
    """Trains variants of a run with several seeds, and compares them seed by seed."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.launch import processes
    from polyad.train import study as studies

    check_json_path(json)
    if figure is not None:
        check_result_file("--figure", figure, (".pdf", ".svg", ".png"))
    with results(json) as show:
        known = studies.load_study(study)
        if dry_run:
            frame = studies.results_of(known)
            say(studies.plan_text(known, frame))
        else:
            frame = studies.finish_runs(known, processes.polyad, say)
        if figure is not None:
            studies.draw(known, frame, figure)
        show(studies.to_json(known, frame), studies.result_text(known, frame))
