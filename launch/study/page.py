"""A study's result as one HTML page that needs nothing beside itself: `polyad study --page`.

It says what was asked, what the intervals answer, how that was found, and what it does not show.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from polyad.launch.output import check_result_file
from polyad.launch.study.drawing import STYLE
from polyad.launch.study.figure import figure
from polyad.launch.study.result import Result, StudyResult, TasksResult, parts_of
from polyad.launch.study.sentences import UNCORRECTED, answers, notes, tasks_note
from polyad.launch.study.tables import Row, over_tasks_rows, tables_of
from polyad.train.page.html import TABLE_CSS, figure_of_table, table
from polyad.train.page.style import CSS
from polyad.train.report.page import POLICY

PAGE_CSS = """
.answers { padding-left: 1.1rem; max-width: 56rem; }
.answers li { margin: .35rem 0; }
section > h3 { margin-top: 1.3rem; }
.question { font-size: 1.1rem; }
.unfinished { border: 1px solid var(--second); border-radius: 8px; padding: .5rem .8rem; }
table.numbers td, table.numbers th { white-space: nowrap; }
table.numbers td.name + td.name { white-space: normal; min-width: 20rem; }
figure.drawn { overflow-x: auto; }
dl.made { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: .6rem 0;
  max-width: 60rem; }
dl.made dd { font-size: .92rem; font-weight: 400; overflow-wrap: anywhere; }
@media screen and (prefers-color-scheme: dark) {
  svg.study { filter: invert(.9) hue-rotate(180deg); }
}
@media print {
  body { background: none; }
  figure, tr, li { break-inside: avoid; }
  figure.drawn, figure.table { overflow: visible; }
  table.numbers td, table.numbers th { white-space: normal; }
}
""" + re.sub(r"(?<![^}])(?=[.\w])", "svg.study ", STYLE)
"""The style of this page beside that of reports; the drawing's own is kept to the drawing."""


def check_page(path: Path, *, dry_run: bool) -> None:
    """Checks, before any work is done, that a page can be written there.

    Raises:
        UsageError: it cannot.
    """
    check_result_file("--page", path, ".html", dry_run=dry_run)


def page(result: Result) -> str:
    """The page.

    Args:
        result: of a study, as `polyad study` makes it.

    Returns:
        HTML.
    """
    name = Path(result.study).stem
    body = _tasks(result) if isinstance(result, TasksResult) else _whole(result)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(name)}: Polyad study</title><style>{CSS}{TABLE_CSS}{PAGE_CSS}</style>"
        f'</head>\n<body><main>\n<header><p class="kicker">Polyad study</p>'
        f"<h1>{escape(name)}</h1>{_unfinished(result)}{_question(result)}</header>\n"
        f"{_answer(result)}\n{_drawing(result)}\n{body}\n{_made(result)}\n{_not_shown(result)}\n"
        f"<footer>Made by <code>polyad study --page</code> from the results in "
        f"{escape(_folder(result))}.</footer>\n</main></body></html>\n"
    )


def _folder(result: Result) -> str:
    folder = next(iter(parts_of(result).values())).folder
    return str(Path(folder).parent if isinstance(result, TasksResult) else folder)


def _unfinished(result: Result) -> str:
    if result.finished:
        return ""
    done = sum(len(part.runs) + len(part.swept) for part in parts_of(result).values())
    return (
        f'<p class="unfinished"><b>This study is not finished</b>: {done:,} of its runs are, and '
        f"what follows is of these alone. It will change.</p>"
    )


def _question(result: Result) -> str:
    asked = result.about.question
    return f'<p class="question">{escape(asked)}</p>' if asked else ""


def _list(sentences: Sequence[str]) -> str:
    return f'<ul class="answers">{"".join(f"<li>{escape(one)}.</li>" for one in sentences)}</ul>'


def _answer(result: Result) -> str:
    found = answers(result)
    said = _list(found) if found else "<p>Nothing is compared yet.</p>"
    better = "higher" if result.higher_is_better else "lower"
    score, baseline = result.scores[0], result.baseline
    return (
        f'<section id="answer"><h2>What the intervals say</h2>{said}<p class="note">Of the '
        f"{escape(score.title)}: each variant's less {escape(baseline)}'s, in pairs of runs "
        f"with the same seed and the same batches; {better} is better. {UNCORRECTED}</p></section>"
    )


def _drawing(result: Result) -> str:
    drawn = figure(result, inline=True)
    if "<text" not in drawn:
        return ""
    return (
        f'<section id="figure"><h2>Figure</h2><figure class="wide drawn">{drawn}</figure></section>'
    )


def _table(heading: str, rows: Sequence[Row], caption: str = "") -> str:
    head, *others = ([escape(cell) for cell in row] for row in rows)
    return figure_of_table(heading, table(head, others), caption, wide=True)


def _whole(result: StudyResult) -> str:
    """The tables of a study without tasks, or of one of them."""
    parts = "".join(_table(heading, rows) for heading, rows in tables_of(result))
    lines = "".join(f"<li>{escape(line)}</li>" for line in notes(result).splitlines())
    return (
        f'<section><h2>Tables</h2><div class="grid">{parts}</div>'
        f'<ul class="answers note">{lines}</ul></section>'
    )


def _tasks(result: TasksResult) -> str:
    """The means over tasks, and each task by itself."""
    overall = _table("Mean over tasks", over_tasks_rows(result))
    each = "".join(
        f"<section><h2>Task {escape(task)}</h2>"
        f"{_list(answers(found)) if answers(found) else '<p>Nothing is compared yet.</p>'}"
        f"</section>{_whole(found)}"
        for task, found in result.tasks.items()
    )
    lines = "".join(f"<li>{escape(line)}</li>" for line in tasks_note(result).splitlines())
    return (
        f'<section><h2>All tasks</h2><div class="grid">{overall}</div>'
        f'<ul class="answers note">{lines}</ul></section>{each}'
    )


def _asked(result: Result) -> str:
    """The study, and the variant beside which it is compared where that is not its baseline."""
    return f"{result.study} --beside {result.beside}" if result.beside else result.study


def _made(result: Result) -> str:
    """How it was made."""
    about = result.about
    parts = parts_of(result)
    days = sorted(day for part in parts.values() for day in part.about.days)
    facts = [
        ("Command", f"<code>polyad study {escape(_asked(result))}</code>"),
        ("Trained", escape(_days(days))),
        ("With", "<br>".join(_environments(parts))),
        ("Base", escape(about.base)),
        ("Seeds", ", ".join(f"{seed}" for seed in result.seeds)),
    ]
    for task, part in parts.items():
        facts.append((f"Task {escape(task)}" if task else "Data", escape(_data(part))))
    if about.common:
        facts.append(("In every run", _keys(about.common)))
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts)
    rows = []
    for name, keys in about.variants.items():
        tried = "".join(
            f"; {_keys({key: values})} tried" for key, values in about.grids.get(name, {}).items()
        )
        baseline = ", the baseline" if name == result.baseline else ""
        said = _keys(keys) if keys else "no key of its own"
        rows.append((f"{escape(name)}{baseline}", f"{said}{tried}"))
    listed_keys = table(("variant", "keys in which it differs"), rows, names=2)
    return (
        f'<section id="made"><h2>How it was made</h2><dl class="made">{listed}</dl>'
        f"{figure_of_table('Variants', listed_keys, wide=True)}</section>"
    )


def _keys(keys: Mapping[str, str]) -> str:
    return ", ".join(f"<code>{escape(f'{key}: {value}')}</code>" for key, value in keys.items())


def _days(days: Sequence[str]) -> str:
    if not days:
        return "no run is finished"
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _environments(parts: Mapping[str, StudyResult]) -> list[str]:
    """Commit, versions and machine of the runs, each that differs once."""
    counts: dict[str, int] = {}
    for part in parts.values():
        for each in part.about.environments:
            commit = each.git_commit or "unknown commit"
            changed = " with uncommitted changes" if each.uncommitted_changes else ""
            versions = ", ".join(f"{name} {number}" for name, number in each.versions.items())
            gpus = ", ".join(each.gpus) or "no GPU"
            said = escape(f"{commit}{changed}; {versions}; {each.platform}; {gpus}")
            counts[said] = counts.get(said, 0) + each.runs
    if not counts:
        return ["unknown: no run's folder is there"]
    return [f"{said} ({runs:,} runs)" for said, runs in counts.items()]


def _data(part: StudyResult) -> str:
    """What runs were trained and scored on."""
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


def _not_shown(result: Result) -> str:
    said = result.about.not_shown or ["The study's file does not say (not_shown)."]
    paragraphs = "".join(f"<p>{escape(one)}</p>" for one in said)
    return f'<section id="not-shown"><h2>What it does not show</h2>{paragraphs}</section>'
