"""`polyad study --page`: a study's result as a self-contained HTML page.

It shows the question, the answers by intervals, the method, and the limitations, with the template
`page.html`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from polyad.launch.output import check_result_file
from polyad.launch.study.figure import figure
from polyad.launch.study.result import Result, StudyResult, TasksResult, parts_of
from polyad.launch.study.sentences import UNCORRECTED, answers, notes, tasks_note
from polyad.launch.study.tables import Row, over_tasks_rows, tables_of
from polyad.train.page import template
from polyad.train.page.html import Figure, Table


def check_page(path: Path, *, dry_run: bool) -> None:
    """Checks, before any work is done, that a page can be written there.

    Raises:
        UsageError: it cannot.
    """
    check_result_file("--page", path, ".html", dry_run=dry_run)


def page(result: Result) -> str:
    """Renders the page.

    Args:
        result: a result of `polyad study`.

    Returns:
        HTML.
    """
    parts = parts_of(result)
    folder, overall, overall_note = next(iter(parts.values())).folder, None, ""
    if isinstance(result, TasksResult):
        folder = str(Path(folder).parent)
        overall = _table("Mean over tasks", over_tasks_rows(result))
        overall_note = tasks_note(result)
    return template.page(
        "launch/study/page.html",
        name=Path(result.study).stem,
        result=result,
        folder=folder,
        done=sum(len(part.runs) + len(part.swept) for part in parts.values()),
        answers=answers(result),
        uncorrected=UNCORRECTED,
        figure=Markup(figure(result, inline=True)),
        overall=overall,
        overall_note=overall_note,
        parts=[
            (
                task,
                answers(part),
                [_table(heading, rows) for heading, rows in tables_of(part)],
                notes(part),
            )
            for task, part in parts.items()
        ],
        made=_made(result, parts),
        variants=_variants(result),
    )


def _table(heading: str, rows: Sequence[Row]) -> Figure:
    return Figure(heading=heading, body=Table(heads=rows[0], rows=rows[1:]), wide=True)


def _made(result: Result, parts: Mapping[str, StudyResult]) -> list[tuple[str, str]]:
    """Facts on how the result was made: names and descriptions."""
    about, days = result.about, sorted(day for part in parts.values() for day in part.about.days)
    trained = "no run is finished"
    if days:
        trained = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    # The variant for comparison, if it is not the baseline.
    beside = f" --beside {result.beside}" if result.beside else ""
    command = f"polyad study {result.study}{beside}"
    facts: list[tuple[str, str]] = [
        ("Command", Markup("<code>{}</code>").format(command)),
        ("Trained", trained),
        ("With", Markup("<br>").join(_environments(parts))),
        ("Base", about.base),
        ("Seeds", ", ".join(f"{seed}" for seed in result.seeds)),
    ]
    facts += [(f"Task {task}" if task else "Data", _data(part)) for task, part in parts.items()]
    return facts + ([("In all runs", _keys(about.common))] if about.common else [])


def _variants(result: Result) -> Figure:
    """The keys of each variant."""
    about, rows = result.about, []
    for name, keys in about.variants.items():
        said = _keys(keys) if keys else Markup("no keys of its own")
        for key, values in about.grids.get(name, {}).items():
            said += Markup("; {} tried").format(_keys({key: values}))
        rows.append((f"{name}, the baseline" if name == result.baseline else name, said))
    heads = ("variant", "keys that differ")
    return Figure(heading="Variants", body=Table(heads=heads, rows=rows, names=2), wide=True)


def _keys(keys: Mapping[str, str]) -> Markup:
    code = Markup("<code>{}: {}</code>")
    return Markup(", ").join(code.format(key, value) for key, value in keys.items())


def _environments(parts: Mapping[str, StudyResult]) -> list[str]:
    """Distinct commits, versions and machines of the runs."""
    counts: dict[str, int] = {}
    for part in parts.values():
        for each in part.about.environments:
            commit = each.git_commit or "unknown commit"
            changed = " with uncommitted changes" if each.uncommitted_changes else ""
            versions = ", ".join(f"{name} {number}" for name, number in each.versions.items())
            gpus = ", ".join(each.gpus) or "no GPU"
            said = f"{commit}{changed}; {versions}; {each.platform}; {gpus}"
            counts[said] = counts.get(said, 0) + each.runs
    if not counts:
        return ["unknown: the run folders do not exist"]
    return [f"{said} ({runs:,} runs)" for said, runs in counts.items()]


def _data(part: StudyResult) -> str:
    """The data on which runs were trained and scored."""
    about, unit = part.about, part.unit
    source = f" ({about.source})" if about.source else ""
    first = next(iter(part.variants.values()), None)
    if first is None:
        return f"{about.data}{source}"
    training = first.training
    return (
        f"{about.data}{source}; {training['steps']:,} steps of "
        f"{training[f'{unit}s_per_step']:,} {unit}s; scored on the {part.scored:,} "
        f"{unit}s of the {part.split} split"
    )
