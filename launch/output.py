"""Output of commands: results on standard output, everything else on standard error."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from polyad.data.files import write_whole
from polyad.launch.command import UsageError
from polyad.train.results import json_value


@contextmanager
def only_results_on_stdout() -> Iterator[TextIO]:
    """Redirects to standard error what libraries print to standard output.

    Works on the file descriptor, because compilers and C++ code print, too.

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
    """A context in which standard output is reserved for results; see `show`.

    Args:
        json_path: value of `--json`.

    Yields:
        A function that shows a result, given a value for `json_value` and a text.

    Raises:
        UsageError: the JSON cannot be written there; no work was done.
    """
    check_json_path(json_path)
    with only_results_on_stdout() as stdout:
        yield partial(show, json_path=json_path, stdout=stdout)


def say(text: str) -> None:
    """Prints lines on standard error."""
    sys.stderr.write(f"{text}\n")  # in one write: runs may print meanwhile
    sys.stderr.flush()


def check_json_path(path: str | None) -> None:
    """Checks, before any work is done, that `show` can write there.

    Raises:
        UsageError: it cannot.
    """
    if path is not None and path != "-":
        check_result_file("--json", Path(path))


def check_result_file(option: str, path: Path, suffixes: Sequence[str] = ()) -> None:
    """Checks, before any work is done, that a result file can be written.

    Args:
        option: the option that names it, such as `--figure`.
        path: the file.
        suffixes: the suffixes that it may have; empty: any.

    Raises:
        UsageError: it cannot.
    """
    if suffixes and path.suffix not in suffixes:
        raise UsageError(f"{option}: {path}: a file that ends in {' or '.join(suffixes)} is needed")
    if path.is_dir() or not path.parent.is_dir():
        wrong = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"{option}: {path}: {wrong}")
    for place in (path, path.resolve().parent) if path.is_file() else (path,):
        if not os.access(place if place.exists() else place.parent, os.W_OK):
            raise UsageError(f"{option}: {path} cannot be written to")


def show(result: object, table: str, json_path: str | None, stdout: TextIO) -> None:
    """Outputs a result as a table and as JSON.

    Args:
        result: a value for `json_value`.
        table: the same as text.
        json_path: a file for the JSON; `-` prints it to standard output instead of the table; None:
            no JSON.
        stdout: standard output for results.
    """
    text = json.dumps(json_value(result), indent=2, allow_nan=False) + "\n"
    if json_path == "-":
        stdout.write(text)
        return
    stdout.write(table + "\n")  # first, since writing the file may fail
    stdout.flush()
    if json_path is not None:
        write_whole(Path(json_path), text)
