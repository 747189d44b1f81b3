"""Tests the counting of lines, functions and files."""

import importlib.util
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.ruler import (
    SCENARIOS,
    Lines,
    Passed,
    Recorder,
    calls_table,
    count_lines,
    count_scenarios,
    lines_by_room,
    lines_table,
    main,
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
        ("", Lines(1, 0, 0, 0)),
        ("\n\n", Lines(1, 0, 0, 2)),
        ("x = 1", Lines(1, 1, 0, 0)),
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


FILES = {
    "model/__init__.py": "",
    "model/a.py": "x = 1\ny = 2\n",
    "model/smoe/b.py": "# comment\nx = 1\n",
    "tests/test_a.py": "\nx = 1\n",
    "src/polyad/__init__.py": "x = 1\n",
    "setup.py": "x = 1\n",
    "docs/text.md": "x = 1\n",
    ".venv/lib/c.py": "x = 1\n",
}


def test_rooms_without_git(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / "model" / "link.py").symlink_to(tmp_path / "model" / "a.py")
    (tmp_path / "src" / "polyad" / "model").symlink_to(tmp_path / "model")
    rows = lines_by_room(tmp_path, ["model"])
    assert rows == {
        "model": Lines(3, 3, 1, 0),
        "model/*.py": Lines(2, 2, 0, 0),
        "model/smoe/": Lines(1, 1, 1, 0),
        "src": Lines(1, 1, 0, 0),
        ".": Lines(1, 1, 0, 0),
        "all but tests": Lines(5, 5, 1, 0),
        "tests": Lines(1, 1, 0, 1),
    }
    assert list(rows)[-1] == "tests"
    widths = {len(line) for line in lines_table(rows)}
    assert len(widths) == 1


def test_only_tracked_files_count(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "model/a.py", "setup.py"], check=True)
    (tmp_path / "setup.py").unlink()
    assert lines_by_room(tmp_path) == {
        "model": Lines(1, 2, 0, 0),
        "all but tests": Lines(1, 2, 0, 0),
    }


MODULE = """
import threading

class Box:
    def __init__(self, value):
        self.value = value

    @property
    def doubled(self):
        return twice(self.value)

def twice(x):
    return sum(x for _ in range(2))  # a generator that runs three times

def numbers():
    yield 1
    yield 2

def outer(run):
    Local = type("Local", (), {})
    class Body:
        pass
    return run(lambda: Box(3).doubled)

def pair():
    return (lambda: 1)(), (lambda: 1)()

def fails():
    raise ValueError

def caught():
    try:
        fails()
    except ValueError:
        return twice(1)

def in_thread():
    thread = threading.Thread(target=twice, args=(1,))
    thread.start()
    thread.join()

def unused():
    pass
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(passed: Passed) -> list[str]:
    return sorted(name.rpartition(":")[0] for _, name in passed.functions)


def theirs(function: Callable[[], object]) -> object:
    """A function of other rooms between two of ours."""
    return function()


GENERATOR = "twice.<locals>.<genexpr>"


@pytest.mark.parametrize(
    ("call", "functions", "depth"),
    [
        (lambda m: m.twice(1), ["twice", GENERATOR], 2),
        (lambda m: list(m.numbers()), ["numbers"], 1),
        (lambda m: m.pair(), ["pair", "pair.<locals>.<lambda>", "pair.<locals>.<lambda>"], 2),
        # outer, the lambda, `doubled`, `twice` and its generator; `theirs` is no function of ours.
        (
            lambda m: m.outer(theirs),
            ["outer", "outer.<locals>.<lambda>", "Box.__init__", "Box.doubled", "twice", GENERATOR],
            5,
        ),
        (lambda m: m.caught(), ["caught", "fails", "twice", GENERATOR], 3),
        (lambda m: m.in_thread(), ["in_thread", "twice", GENERATOR], 2),
        (lambda m: theirs(lambda: 1), [], 0),
    ],
)
def test_a_call_passes_the_functions_that_run(
    tmp_path: Path, call: Callable[[ModuleType], object], functions: list[str], depth: int
) -> None:
    write(tmp_path, {"model/a.py": MODULE})
    module = load(tmp_path / "model" / "a.py")
    with Recorder(tmp_path) as recorder:
        passed = recorder.count(lambda: call(module))
    assert names(passed) == sorted(functions)
    assert passed.depth == depth
    assert passed.files == ({"model/a.py"} if functions else set())


def test_a_call_passes_files_of_rooms_by_any_name(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    write(root, {"model/a.py": "def f(g):\n    g()\n", "data/b.py": "def f(g):\n    g()\n"})
    write(root, {"tests/c.py": "def f(g):\n    g()\n"})
    write(tmp_path, {"other/model/d.py": "def f(g):\n    g()\n"})
    (tmp_path / "package").symlink_to(root / "model")
    places = ("package/a.py", "repository/data/b.py", "repository/tests/c.py", "other/model/d.py")
    through_link, data, tests, other = (load(tmp_path / place) for place in places)
    with Recorder(root) as recorder:
        passed = recorder.count(
            lambda: through_link.f(lambda: tests.f(lambda: other.f(lambda: data.f(int))))
        )
    assert passed == Passed((("data/b.py", "f:1"), ("model/a.py", "f:1")), 2)


def test_imports_are_left_out_and_late_threads_are_not(tmp_path: Path) -> None:
    text = "def first():\n    return 1\nVALUE = first()\ndef later():\n    pass\n"
    write(tmp_path, {"model/a.py": text})
    kept: list[ModuleType] = []
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        while asked.acquire() and kept:
            kept[0].later()
            answered.release()

    def call() -> None:
        if not kept:
            kept.append(load(tmp_path / "model" / "a.py"))
            threading.Thread(target=work, daemon=True).start()
        asked.release()
        answered.acquire()

    with Recorder(tmp_path) as recorder:
        passed = recorder.count(call)
    kept.clear()
    asked.release()
    assert names(passed) == ["later"]


def test_a_token_passes_the_model_alone() -> None:
    (passed,) = count_scenarios(["token"]).values()
    assert {file.partition("/")[0] for file in passed.files} == {"model"}
    assert "Block.forward" in names(passed)
    table = "\n".join(calls_table({"token": passed}, with_names=True))
    assert f"{len(passed.files)} " in table
    assert "model/block.py:Block.forward:" in table


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--calls", "model"])
    assert f"model is unknown; known: {', '.join(SCENARIOS)}" in capsys.readouterr().err
