"""Tests the counting of lines, functions and files."""

import importlib.util
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.ruler import (
    Lines,
    calls_table,
    count_lines,
    count_scenarios,
    functions_passed,
    lines_by_room,
    lines_table,
)

SOURCE = '''"""A docstring

of three lines."""

# A comment.
import os  # of a statement


class Point:
    """A docstring."""

    x: int = (
        # A comment inside of a statement.

        1
    )
    """Says what x is.""" \\
    " Twice."
    text = """A value

    # of three lines."""

    def there(self) -> None: "A docstring on a line of code."
'''


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # code: import, class, x = (, 1, ), three of text, def;
        # comment: three lines, one, the class's, one in brackets, two of x; blank: five and one.
        (SOURCE, Lines(1, 9, 8, 6)),
        ("# no end of line", Lines(1, 0, 1, 0)),
        ("x = 1; 'a string after it'\n", Lines(1, 1, 0, 0)),
        ("print(\n    'a string')\n", Lines(1, 2, 0, 0)),
        ("x = '\x0c\u2028'\n", Lines(1, 1, 0, 0)),  # lines to `str.splitlines`, not to Python
    ],
)
def test_lines_are_counted_as_by_hand(source: str, expected: Lines) -> None:
    assert count_lines(source) == expected


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_rooms_with_and_without_git(tmp_path: Path) -> None:
    write(tmp_path, {
        "model/a.py": "x = 1\ny = 2\n", "model/smoe/b.py": "# comment\nx = 1\n",
        "tests/test_a.py": "\nx = 1\n", "src/polyad/__init__.py": "x = 1\n", "setup.py": "x = 1\n",
        "docs/text.md": "x = 1\n", ".venv/lib/c.py": "x = 1\n",
    })  # fmt: skip
    (tmp_path / "src" / "polyad" / "model").symlink_to(tmp_path / "model")
    rows = lines_by_room(tmp_path, ["model"])
    assert rows == {
        "model": Lines(2, 3, 1, 0),
        "model/*.py": Lines(1, 2, 0, 0),
        "model/smoe/": Lines(1, 1, 1, 0),
        "src": Lines(1, 1, 0, 0),
        ".": Lines(1, 1, 0, 0),
        "all but tests": Lines(4, 5, 1, 0),
        "tests": Lines(1, 1, 0, 1),
    }
    assert list(rows)[-1] == "tests"
    assert len({len(line) for line in lines_table(rows)}) == 1
    for words in (["init", "-q"], ["add", "model/a.py", "setup.py"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "setup.py").unlink()
    assert lines_by_room(tmp_path) == dict.fromkeys(["model", "all but tests"], Lines(1, 2, 0, 0))


MODULE = """
import threading

def twice(x):
    return sum(x for _ in range(2))  # a generator that runs three times

def outer(run):
    class Body:
        pass
    return run(lambda: twice(1))

def in_thread():
    thread = threading.Thread(target=twice, args=(1,))
    thread.start()
    thread.join()

def unused():
    pass

VALUE = twice(1)
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(passed: list[tuple[str, str]]) -> list[str]:
    return sorted(name.rpartition(":")[0] for _, name in passed)


def theirs(function: Callable[[], object]) -> object:
    """A function of other rooms between two of ours."""
    return function()


TWICE = ["twice", "twice.<locals>.<genexpr>"]


@pytest.mark.parametrize(
    ("call", "functions"),
    [
        (lambda m: m.twice(1), TWICE),
        # outer, the lambda, `twice` and its generator; `theirs` is no function of ours.
        (lambda m: m.outer(theirs), ["outer", "outer.<locals>.<lambda>", *TWICE]),
        (lambda m: m.in_thread(), ["in_thread", *TWICE]),
        (lambda m: theirs(lambda: 1), []),
    ],
)
def test_a_call_passes_the_functions_that_run(
    tmp_path: Path, call: Callable[[ModuleType], object], functions: list[str]
) -> None:
    write(tmp_path, {"model/a.py": MODULE})
    (tmp_path / "package").symlink_to(tmp_path / "model")
    module = load(tmp_path / "package" / "a.py")
    passed = functions_passed(lambda: call(module), tmp_path)
    assert names(passed) == sorted(functions)
    assert {file for file, _ in passed} == ({"model/a.py"} if functions else set())
    assert not threading.getprofile()


def test_a_token_passes_the_model_alone() -> None:
    (passed,) = count_scenarios(["token"]).values()
    assert {file.partition("/")[0] for file, _ in passed} == {"model"}
    assert "Block.forward" in names(passed)
    table = "\n".join(calls_table({"token": passed}, with_names=True))
    assert "model/block.py:Block.forward:" in table
