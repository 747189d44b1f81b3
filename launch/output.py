"""What a command prints: results on standard output, everything else on standard error."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TextIO

from polyad.data.files import named
from polyad.launch.command import UsageError
from polyad.train.results import aligned, json_value


@contextmanager
def only_results_on_stdout() -> Iterator[TextIO]:
    """Sends to standard error whatever libraries print to standard output.

    Works on the file descriptor, because compilers and C++ code print too.

    Yields:
        The real standard output, for the results.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(saved), "w", encoding="utf-8") as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


@contextmanager
def results(json_path: str | None) -> Iterator[Callable[[object, str], None]]:
    """A context in which standard output is for results alone; see `show`.

    Args:
        json_path: of `--json`.

    Yields:
        What shows a result: it takes what `json_value` takes, and the same for a person.

    Raises:
        UsageError: the JSON cannot be written there; no work was done.
    """
    check_json_path(json_path)
    with only_results_on_stdout() as stdout:
        yield partial(show, json_path=json_path, stdout=stdout)


def pass_on(lines: IO[str], to: IO[str], prefix: str) -> None:
    """Shows what another process says as it comes, until its end.

    Args:
        lines: of the process.
        to: where they go; once nobody reads there, they are dropped.
        prefix: in front of each line.
    """
    for line in lines:
        with suppress(OSError, ValueError):
            to.write(f"{prefix}{line}")
            to.flush()


def say(text: str) -> None:
    """Shows lines on standard error."""
    sys.stderr.write(f"{text}\n")  # at once: runs may speak meanwhile
    sys.stderr.flush()


def check_json_path(path: str | None) -> None:
    """Checks, before any work is done, that `show` will be able to write there.

    Raises:
        UsageError: it will not.
    """
    if path in (None, "-"):
        return
    target = Path(str(path))
    if target.is_dir():
        raise UsageError(
            f"--json: {path} is a folder, but a file is needed (or - for standard output)"
        )
    if not target.parent.is_dir():
        raise UsageError(f"--json: {path}: there is no folder {target.parent}")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UsageError(f"--json: {path} cannot be written to")


def check_result_file(option: str, path: Path, suffix: str, *, dry_run: bool) -> None:
    """Checks, before any work is done, that a file for a result can be written there.

    Args:
        option: that names it, as `--figure`.
        path: the file.
        suffix: that it has to have, as `.svg`.
        dry_run: whether there will be no result.

    Raises:
        UsageError: it cannot.
    """
    if dry_run:
        raise UsageError(
            f"{option}: {path} is not allowed with --dry-run, which produces no results"
        )
    if path.suffix != suffix:
        raise UsageError(f"{option}: {path}: a file that ends in {suffix} is needed")
    if path.is_dir() or not path.parent.is_dir():
        wrong = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"{option}: {path}: {wrong}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option}: {path} cannot be written to")


def show(result: object, table: str, json_path: str | None, stdout: TextIO) -> None:
    """Hands over a result: the table to a person, JSON to a program.

    Args:
        result: what `json_value` takes.
        table: the same for a person.
        json_path: a file for the JSON; `-` puts it on standard output instead of the table; None
            wants no JSON.
        stdout: where results go.
    """
    text = json.dumps(json_value(result), indent=2, allow_nan=False) + "\n"
    if json_path == "-":
        stdout.write(text)
        return
    stdout.write(table + "\n")  # first: the file may fail, and the result took long
    stdout.flush()
    if json_path is not None:
        with named(Path(json_path)):
            Path(json_path).write_text(text, encoding="utf-8")


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns: the first to the left, as names are, the others to the right, as numbers."""
    return "\n".join(aligned(rows))
