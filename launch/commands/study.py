"""`polyad study`: variants of a run over several seeds, compared in pairs."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from polyad.data.files import write_whole
from polyad.launch.command import Argument, Json, UsageError, command, positive
from polyad.launch.output import check_json_path, results


@command(
    "study",
    "polyad study configs/studies/mumoe.yaml --dry-run",
    "polyad study configs/studies/mumoe.yaml --markdown",
)
def study(
    study: Annotated[
        Path,
        Argument(
            "a YAML file (run the same command again to continue a study), or the results.json of "
            "a study, which is shown again without needing its runs",
            "STUDY",
        ),
    ],
    *,
    dry_run: Annotated[
        bool,
        Argument("print what would be trained and what is finished, without starting anything"),
    ] = False,
    jobs: Annotated[
        int,
        Argument(
            "number of runs to train at a time, each with its share of this machine's cores; "
            "default 1",
            "N",
            positive,
        ),
    ] = 1,
    beside: Annotated[
        str | None,
        Argument(
            "compare the finished runs with this variant instead of the baseline; starts nothing "
            "and changes nothing, so it can be used while the study is running",
            "VARIANT",
        ),
    ] = None,
    markdown: Annotated[bool, Argument("print the tables as Markdown")] = False,
    figure: Annotated[Path | None, Argument("plot the comparison in FILE (.svg)", "FILE")] = None,
    page: Annotated[
        Path | None,
        Argument(
            "write the whole result to FILE as one .html page: the question, what the intervals "
            "show, figure, tables, and how it was made; also written when a run fails or is "
            "stopped",
            "FILE",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Trains variants of a run with several seeds, and compares them seed by seed."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.launch.study import figure as figures
    from polyad.launch.study import page as pages
    from polyad.launch.study import run as runs
    from polyad.launch.study.progress import plans_table
    from polyad.launch.study.result import form_of, kept_result
    from polyad.launch.study.tables import result_table
    from polyad.train.errors import ConfigError, RunError, Stopped

    check_json_path(json)
    is_kept = study.suffix == ".json"  # a result, and no study
    training = {"--dry-run": dry_run, "--jobs": jobs > 1}
    given = [option for option, is_given in training.items() if is_given]
    if beside is not None and given:
        raise UsageError(f"--beside: {beside} is not allowed with {given[0]}")
    given += ["--beside"] if beside is not None else []
    if is_kept and given:
        raise UsageError(f"{given[0]}: is not allowed with {study}, which is the result of a study")
    if figure is not None:
        figures.check_figure(figure, dry_run=dry_run)
    if page is not None:
        pages.check_page(page, dry_run=dry_run)
    with results(json) as show:
        if dry_run:
            plan = runs.describe_study(study, jobs)
            show(plan.to_json(), plans_table(plan))
            return
        try:
            if is_kept:
                result = kept_result(study)
            elif beside is None:
                result = runs.study(study, jobs)
            elif (known := runs.compare_finished(study, beside)) is not None:
                result = known
            else:
                raise ConfigError(
                    f"{study}: no run is finished yet, so there is nothing to compare"
                )
        except (RunError, Stopped, KeyboardInterrupt):
            if page is not None and (found := runs.compare_finished(study)):
                write_whole(page, pages.page(found))
            raise
        with form_of(study) if is_kept else nullcontext():
            if figure is not None:
                write_whole(figure, figures.figure(result))
            if page is not None:
                write_whole(page, pages.page(result))
            table = result_table(result, markdown=markdown)
        show(result.to_json(), table)
