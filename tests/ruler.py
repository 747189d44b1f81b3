"""Measures the size of the code: lines by room, and how much of it a call passes through.

    python -m tests.ruler                           # lines by room
    python -m tests.ruler model parallel            # with a row for each folder of these rooms
    python -m tests.ruler --calls                   # functions and files that two calls pass
    python -m tests.ruler --calls training --list     # with the names of the functions of one

A room is a folder at the top of the repository; only tracked Python files count. A line is code if
it holds any of a statement, comment if it holds only a comment or a docstring (the strings under
fields and constants are docstrings too, with the empty lines in them), and blank otherwise.

A call passes through a function if its body runs, and through a file if one of its functions does.
Functions are those written in the rooms of the product: also methods, lambdas, comprehensions and
generator expressions, which are functions to Python 3.11 (from 3.12 on, only the last are). Each
counts once however often it runs. A call is run twice and the second run is counted, which leaves
out imports, with what pydantic does in them, and values that are computed once for a process.
Blocks run on the CPU, by the kernels that `POLYAD_KERNELS` says.
"""

import argparse
import contextlib
import cProfile
import inspect
import io
import itertools
import subprocess
import tempfile
import threading
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("model", "parallel", "train", "data", "launch", "src")
"""The rooms of the product, in the order of the table; `tests` and others come after them. `src`
has what belongs to the package `polyad` as a whole, beside links to the other rooms."""
TARGETS = {
    "model": 5_800, "parallel": 4_000, "train": 12_500, "data": 3_200, "launch": 2_700,
    "all but tests": 28_200, "tests": 32_000,
}  # fmt: skip
"""Lines of code that a room is meant to have at most."""
FILES_TARGETS = {"all but tests": 230}
"""Files likewise."""
_BETWEEN = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Lines(NamedTuple):
    """Sizes of one file or of several."""

    files: int = 0
    code: int = 0
    comment: int = 0
    """Comments and docstrings."""
    blank: int = 0

    def plus(self, other: "Lines") -> "Lines":
        """The sizes of both."""
        return Lines(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def count_lines(source: str) -> Lines:
    """Counts the lines of one file.

    Args:
        source: Its text.
    """
    code, comment = set[int](), set[int]()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment.add(token.start[0])
        elif token.type not in _BETWEEN:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            only_text = all(each.type == tokenize.STRING for each in statement)
            for each in statement:
                rows = range(each.start[0], each.end[0] + 1)
                (comment if only_text else code).update(rows)
            statement = []
    comment -= code
    lines = source.count("\n") + (source[-1:] not in ("", "\n"))
    return Lines(1, len(code), len(comment), lines - len(code) - len(comment))


def python_files(root: Path) -> list[Path]:
    """The Python files that git tracks, or without git those outside of hidden folders.

    Args:
        root: The repository.

    Returns:
        Paths relative to `root`, in order; none that a link leads to.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--", "*.py"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    found = {Path(name) for name in listed.split("\0") if name}
    if not found:
        walked = (path.relative_to(root) for path in root.rglob("*.py"))
        found = {path for path in walked if not any(part[0] == "." for part in path.parts)}
    root = root.resolve()
    return sorted(p for p in found if (root / p).is_file() and (root / p).resolve() == root / p)


def lines_by_room(root: Path, divided: Collection[str] = ()) -> dict[str, Lines]:
    """Counts the lines of each room, and of all but the tests.

    Args:
        root: The repository.
        divided: Rooms whose folders have rows of their own, below the room's.

    Returns:
        Sizes by the name of a room or folder, in the order of the table; files at the top of the
        repository are under ".".
    """
    found: dict[str, Lines] = {}
    for path in python_files(root):
        with tokenize.open(root / path) as file:
            lines = count_lines(file.read())
        room = path.parts[0] if len(path.parts) > 1 else "."
        names = [room]
        if room in divided:
            names.append(f"{room}/{path.parts[1]}/" if len(path.parts) > 2 else f"{room}/*.py")
        names += [] if room == "tests" else ["all but tests"]
        for name in names:
            found[name] = found.get(name, Lines()).plus(lines)
    last = [name for name in ("all but tests", "tests") if name in found]
    ours = [room for room in ROOMS if room in found]
    others = sorted(n for n in found if "/" not in n and n not in (*ours, *last))
    rows = {}
    for room in (*ours, *others, *last):
        rows[room] = found[room]
        rows |= {n: found[n] for n in sorted(found) if n.startswith(f"{room}/")}
    return rows


def lines_table(rows: dict[str, Lines]) -> Iterator[str]:
    """The rows of `lines_by_room` as text."""
    heads = f"{'room':<22}{'files':>7}{'code':>9}{'comment':>9}{'blank':>9}{'code a file':>13}"
    yield f"{heads}{'files meant':>13}{'code meant':>12}"
    for name, lines in rows.items():
        numbers = "".join(f"{number:>9,}" for number in lines[1:])
        indented = f"  {name}" if "/" in name else name
        files, code = FILES_TARGETS.get(name, ""), TARGETS.get(name, "")
        meant = f"{files:>13}{code:>12,}" if code else " " * 25
        yield f"{indented:<22}{lines.files:>7}{numbers}{lines.code / lines.files:>13.0f}{meant}"


def functions_passed(
    call: Callable[[], object], root: Path, rooms: Iterable[str] = ROOMS
) -> list[tuple[str, str]]:
    """Runs a call twice, and records the second time, in all threads that start meanwhile.

    Args:
        call: What is run.
        root: The repository.
        rooms: The folders in it whose functions count, whatever name they are imported by.

    Returns:
        File, relative to the repository, and qualified name with the line that it begins in.
    """
    call()
    profiles: list[cProfile.Profile] = []

    def begin(*event: object) -> None:
        profiles.append(cProfile.Profile(builtins=False))
        profiles[-1].enable()

    threading.setprofile(begin)
    begin()
    try:
        call()
    finally:
        profiles[0].disable()
        threading.setprofile(None)
    root, passed = root.resolve(), set()
    for entry in (each for profile in profiles for each in profile.getstats()):
        code = entry.code
        # Bodies of modules and classes are not optimized.
        if isinstance(code, str) or not code.co_flags & inspect.CO_OPTIMIZED:
            continue
        path = Path(code.co_filename).resolve()
        if path.is_file() and any(path.is_relative_to(root / room) for room in rooms):
            function = f"{code.co_qualname}:{code.co_firstlineno}"
            passed.add((path.relative_to(root).as_posix(), function))
    return sorted(passed)


GPT2: dict[str, Any] = {
    "kind": "gpt2", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 16,
    "vocab_size": 64,
}  # fmt: skip
SPARSE: dict[str, Any] = {"kind": "smoe", "num_experts": 4, "top_k": 2}

# Each scenario gets a folder for files, prepares a call, and returns it.
Scenario: TypeAlias = Callable[[Path], Callable[[], object]]


def _small_run(folder: Path) -> Path:
    """A configuration of three steps on text that is prepared: two validations, one checkpoint."""
    from polyad.data.text.prepare import prepare
    from polyad.model.config import dump_yaml

    text = "".join(f"It was the {word} of times. " for word in ("best", "worst", "age") * 400)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text(text)
    prepare(str(folder / "texts"), "train:300", folder / "data")
    model = {key: value for key, value in GPT2.items() if key != "vocab_size"}
    tree = {
        "run": {"folder": str(folder / "run")},
        "model": model | {"feed_forward": SPARSE},
        "data": {"path": str(folder / "data")},
        "train": {"steps": 3, "global_batch_size": 4, "micro_batch_size": 2},
        "evaluation": {"every": 2},
    }
    path = folder / "config.yaml"
    path.write_text(dump_yaml(tree))
    return path


def token(folder: Path) -> Callable[[], object]:
    """One token through a block of a sparse GPT-2."""
    import torch

    from polyad.model.build import build_model, materialize, read_model_config

    model = build_model(read_model_config(GPT2 | {"feed_forward": SPARSE}))
    materialize(model, seed=0)
    block = model.eval().get_submodule("blocks.1")
    token_BTD = torch.randn(1, 1, GPT2["hidden_size"], generator=torch.Generator().manual_seed(0))

    def call() -> None:
        with torch.inference_mode():
            block(token_BTD)

    return call


def training(folder: Path) -> Callable[[], object]:
    """`polyad train`: three steps of a sparse GPT-2, with validations and a checkpoint."""
    from polyad.launch.cli import run
    from polyad.parallel import comm

    config, number = _small_run(folder), itertools.count()

    def call() -> None:
        said = io.StringIO()
        quiet = contextlib.redirect_stdout(said), contextlib.redirect_stderr(said)
        with quiet[0], quiet[1], mock.patch.object(comm, "shutdown"):
            status = run(["train", str(config), f"run.folder={folder}/run-{next(number)}"])
        if status:
            raise RuntimeError(said.getvalue())

    return call


SCENARIOS: dict[str, Scenario] = {"token": token, "training": training}


def count_scenarios(chosen: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """The functions that some calls pass through, as `functions_passed` has them.

    Args:
        chosen: Their names.
    """
    import torch

    torch.set_num_threads(1)  # with more, experts run over as many as the machine has
    found = {}
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = functions_passed(SCENARIOS[name](Path(folder)), ROOT)
    return found


def calls_table(
    found: dict[str, list[tuple[str, str]]], *, with_names: bool = False
) -> Iterator[str]:
    """What `count_scenarios` gave as text.

    Args:
        found: What each call passed through.
        with_names: Whether the functions of each follow it.
    """
    yield f"{'call':<12}{'files':>5}{'functions':>11}"
    for name, passed in found.items():
        numbers = f"{len({file for file, _ in passed}):>5}{len(passed):>11}"
        yield f"{name:<12}{numbers}   {SCENARIOS[name].__doc__}"
        if with_names:
            yield from (f"    {file}:{function}" for file, function in passed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.ruler", description=summary)
    parser.add_argument(
        "names", nargs="*", help="rooms to divide into folders, or with --calls which: all"
    )
    parser.add_argument(
        "--calls", action="store_true", help="count what calls pass through, in place of lines"
    )
    parser.add_argument("--list", action="store_true", help="with --calls: name the functions")
    given = parser.parse_args(arguments)
    known = SCENARIOS if given.calls else lines_by_room(ROOT)
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"{unknown[0]} is unknown; known: {', '.join(known)}")
    if given.calls:
        table = calls_table(count_scenarios(given.names or SCENARIOS), with_names=given.list)
    else:
        table = lines_table(lines_by_room(ROOT, given.names))
    print("\n".join(table))


if __name__ == "__main__":
    main()
