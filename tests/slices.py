"""The slow tests in twenty slices: `make test` runs all other tests and one slice.

A checksum of its name says which slice a test marked `slow` is in. `pytest --slice 3` leaves out
the slow tests of the other slices, `--slice due` those that it is not the turn of, `--slice all`
none. A slice that was run whole is recorded in `slices.json`, which is committed with the change.

    python -m tests.slices     # fails where a record is old or red
"""

import json
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

SLICES = 20
MAX_AGE = 25
"""Recorded runs since a slice's own, from which on `make check` fails."""
RECORD = Path(__file__).with_name("slices.json")
ROOT = RECORD.parent.parent

Row = dict[str, Any]
"""One slice's last run: `run` (a running number), `commit`, `date`, `passed`, `failed`, `skipped`,
`seconds` (the sum of its tests')."""


def slice_of(nodeid: str) -> int:
    """The slice of a slow test, from its name relative to the repository."""
    return zlib.crc32(nodeid.encode()) % SLICES


def read_record() -> dict[int, Row]:
    """The last run of each slice that was run."""
    rows = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {int(number): row for number, row in rows.items()}


def write_record(rows: dict[int, Row]) -> None:
    """Writes one line for each slice, so that changes of several branches merge."""
    lines = ",\n".join(f'"{number}": {json.dumps(rows[number])}' for number in sorted(rows))
    RECORD.write_text(f"{{\n{lines}\n}}\n")


def last_run(rows: dict[int, Row]) -> int:
    """The number of the last recorded run."""
    return max((row["run"] for row in rows.values()), default=0)


def behind(rows: dict[int, Row], age: int) -> list[int]:
    """Slices that are red, or were not run for more than `age` runs: the longest wait first.

    One without a record has waited since the first run that was recorded.
    """
    last = last_run(rows)
    found = [
        number
        for number in range(SLICES)
        if last - _run_of(rows, number) > age or (number in rows and rows[number]["failed"])
    ]
    return sorted(found, key=lambda number: _run_of(rows, number))


def due(rows: dict[int, Row], commits: int | None) -> int:
    """The slice whose turn it is.

    It steps with the commits. One that they have passed over for a whole round comes first, and
    before it one that was never run: several commits may be tested at once, and then some slices
    would never be met.

    Args:
        rows: The record.
        commits: The number of commits in this clone's history; None: it is not known.
    """
    never = [number for number in range(SLICES) if number not in rows]
    late = [*never, *behind(rows, SLICES)]
    return late[0] if late else (commits or 0) % SLICES


def _run_of(rows: dict[int, Row], number: int) -> int:
    run: int = rows[number]["run"] if number in rows else 0
    return run


def commits_here() -> int | None:
    """How many commits this clone's history has; None where it has none or only the newest."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return None
    return int(_git("rev-list", "--count", "HEAD") or 0) or None


def _git(*words: str) -> str:
    """What a Git command prints; nothing where it fails or Git is missing."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def chosen_slices(word: str) -> list[int]:
    """The slices that `--slice` names.

    Raises:
        pytest.UsageError: It names none.
    """
    if word == "all":
        return list(range(SLICES))
    if word == "due":
        return [due(read_record(), commits_here())]
    if word.isdecimal() and int(word) < SLICES:
        return [int(word)]
    raise pytest.UsageError(f"--slice {word}: a number from 0 to {SLICES - 1}, 'due' or 'all'")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--slice`."""
    help_text = "slow tests of this slice alone: a number, 'due' or 'all'; records a whole run"
    parser.addoption("--slice", metavar="N", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """Chooses slices once: processes of pytest-xdist are told the number."""
    word = config.getoption("slice")
    if word is None:
        return
    chosen = chosen_slices(word)
    if word == "due":
        config.option.slice = str(chosen[0])
    config.pluginmanager.register(_Sliced(chosen), "slices")


class _Sliced:
    """The hooks of a run with `--slice`."""

    def __init__(self, chosen: list[int]) -> None:
        self._chosen = chosen
        self._outcomes: dict[str, str] = {}
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._said: list[str] = []

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves out slow tests of other slices."""
        left_out = [
            item
            for item in items
            if item.get_closest_marker("slow") and slice_of(item.nodeid) not in self._chosen
        ]
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes the outcome of a slow test: a failure in any phase stays one."""
        if "slow" not in report.keywords:
            return
        self._seconds[slice_of(report.nodeid)] += report.duration
        tells = report.when == "call" or report.outcome != "passed"
        if tells and self._outcomes.get(report.nodeid) != "failed":
            self._outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Records slices that were run whole."""
        if hasattr(session.config, "workerinput"):  # the first process of pytest-xdist does it
            return
        whole = _ran_whole(session, exitstatus)
        rows = read_record()
        for number in self._chosen:
            rows[number] = self._row(number, last_run(rows) + 1)
            self._said.append(_in_words(number, rows[number]) + ("" if whole else ", not recorded"))
        if whole:
            write_record(rows)

    def _row(self, number: int, run: int) -> Row:
        ours = [out for name, out in self._outcomes.items() if slice_of(name) == number]
        counts = {name: ours.count(name) for name in ("passed", "failed", "skipped")}
        return {
            "run": run,
            "commit": _git("rev-parse", "--short", "HEAD"),
            "date": datetime.now(UTC).date().isoformat(),
            **counts,
            "seconds": round(self._seconds[number]),
        }

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says which slice was run, and whether it was chosen without a history."""
        for line in self._said:
            terminalreporter.write_line(line)
        if len(self._chosen) == 1 and commits_here() is None:
            terminalreporter.write_line("without the whole Git history the slices do not step")


def _ran_whole(session: pytest.Session, exitstatus: int) -> bool:
    """Whether nothing but marks and slices chose tests, and all of them ran."""
    option, source = session.config.option, session.config.args_source
    narrowed = option.keyword or option.deselect or option.ignore or option.ignore_glob or option.lf
    return (
        source is pytest.Config.ArgsSource.TESTPATHS
        and option.markexpr in ("", "slow")
        and not narrowed
        and not (session.shouldfail or session.shouldstop)
        and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    )


def _in_words(number: int, row: Row) -> str:
    counts = ", ".join(f"{row[name]} {name}" for name in ("passed", "failed", "skipped"))
    return f"slice {number} of the slow tests: {counts} in {row['seconds']} s of tests"


def problems(rows: dict[int, Row]) -> Iterable[str]:
    """A line for each slice that has to be run before a change is merged."""
    for number in behind(rows, MAX_AGE):
        row = rows.get(number)
        if row is not None and row["failed"]:
            said = f"has {row['failed']} failed tests ({row['date']}, {row['commit']})"
        else:
            waited = last_run(rows) - _run_of(rows, number)
            since = "was never run" if row is None else "was run long ago"
            said = f"{since}: {waited} runs were recorded without it, {MAX_AGE} are allowed"
        yield f"slice {number} of the slow tests {said}: make test-slice SLICE={number}"


def main() -> int:
    """Says how old the slices' records are; fails where one is red or too old."""
    rows = read_record()
    lines = list(problems(rows))
    for line in lines:
        print(line, file=sys.stderr)
    if not lines:
        dates = f", the first on {min(row['date'] for row in rows.values())}" if rows else ""
        print(f"slow tests: {len(rows)} of {SLICES} slices passed{dates}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
