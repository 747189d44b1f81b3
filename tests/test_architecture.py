"""The walls of the house: who imports whom, and what every room has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("model", "data", "parallel", "train", "launch")

# launch -> train -> parallel -> {data | model}
BELOW = {
    "model": set(),
    "data": set(),
    "parallel": {"model", "data"},
    "train": {"parallel", "model", "data"},
    "launch": {"train", "parallel", "model", "data"},
}
# Library -> room -> modules of it that the room may import. Nothing is allowed elsewhere.
COMMUNICATION = {
    "torch.distributed": {"parallel": ("torch.distributed",)},
    "deepspeed": {"parallel": ("deepspeed",)},
    "megatron": {"parallel": ("megatron",), "data": ("megatron.core.datasets",)},
}


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Every module that a file may load, wherever the import stands, with its line; ours without
    the `polyad.` before them, as their folders are called."""
    for module, line in _imported(tree, package):
        yield module.removeprefix("polyad."), line


def _imported(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            # `from torch import distributed` loads torch.distributed.
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif _is_import_call(node):
            yield node.args[0].value, node.lineno  # type: ignore[attr-defined]


def _is_import_call(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return False
    name = ast.unparse(node.func)
    return name in {"__import__", "import_module", "importlib.import_module"} and isinstance(
        node.args[0].value, str
    )


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def violations(root: Path) -> list[str]:
    """What breaks a wall below `root`, each as `file:line: reason`."""
    found = []
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            relative = path.relative_to(root)
            package = ".".join(relative.parent.parts)
            tree = ast.parse(path.read_text(encoding="utf-8"), str(relative))
            for module, line in imported(tree, package):
                if reason := refusal(room, module):
                    found.append(f"{relative}:{line}: {reason}")
    return found


def refusal(room: str, module: str) -> str | None:
    top = module.partition(".")[0]
    if top in ROOMS and top != room and top not in BELOW[room]:
        return f"{room} may not import {module}: it may use {sorted(BELOW[room]) or 'no room'}"
    if top == "tests":
        return f"{room} may not import {module}: tests are for tests"
    for library, allowed in COMMUNICATION.items():
        if is_within(module, library) and not any(
            is_within(module, ours) for ours in allowed.get(room, ())
        ):
            return f"{room} may not import {module}: {library} is for {sorted(allowed)}"
    return None


def test_imports_go_down_only() -> None:
    assert violations(ROOT) == []


def imports_of_files(root: Path) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports, wherever the import stands."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for room in ROOMS
        for path in (root / room).rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        package = ".".join(path.relative_to(root).parent.parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # `from room.file import name` is given as room.file.name.
        pairs = [(m, m.rpartition(".")[0]) for m, _ in imported(tree, package)]
        found[name] = {m if m in files else above for m, above in pairs} & files.keys() - {name}
    return found


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next, and the last the first; none: nothing."""
    left = {name: set(others) for name, others in imports.items()}
    while ends := [name for name, others in left.items() if not others & left.keys()]:
        for name in ends:
            del left[name]
    found: list[str] = []
    name = next(iter(left), None)
    while name is not None and name not in found:
        found.append(name)
        name = min(left[name] & left.keys())
    return found[found.index(name) :] if name is not None else []


def test_no_two_files_import_each_other() -> None:
    assert circle(imports_of_files(ROOT)) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"train/a.py": "import train.b", "train/b.py": "from train.a import x"}, ["a", "b"]),
        ({"train/a.py": "from train import b", "train/b.py": "def f():\n    import train.c",
          "train/c.py": "from .a import x", "train/d.py": "import train.a"}, ["a", "b", "c"]),
        ({"train/a.py": "from train.b import train", "train/b.py": "import os"}, []),
    ],
)  # fmt: skip
def test_a_circle_of_imports_is_found(
    tmp_path: Path, files: dict[str, str], expected: list[str]
) -> None:
    (tmp_path / "train").mkdir()
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    assert sorted(circle(imports_of_files(tmp_path))) == [f"train.{name}" for name in expected]


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("model/block.py", "import os\nfrom data.prepare import prepare", ":2: model may not"),
        (
            "data/text/documents.py",
            "def f():\n    import model.gpt2",
            ":2: data may not import model.gpt2",
        ),
        ("parallel/a/b.py", "from train import loop", "parallel/a/b.py:1: parallel may not"),
        (
            "train/loop/loop.py",
            "from torch import distributed",
            ":1: train may not import torch.dist",
        ),
        ("train/loop/loop.py", "import torch.distributed as dist", "torch.distributed is for"),
        ("launch/cli.py", "if True:\n    import deepspeed.ops", ":2: launch may not"),
        ("launch/cli.py", "import importlib\nimportlib.import_module('megatron')", ":2: launch"),
        ("data/text/writer.py", "from megatron.core import parallel_state", ":1: data may not"),
        ("model/x.py", "from ..train import loop", "model may not import train.loop"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, text: str, reason: str) -> None:
    for room in ROOMS:
        (tmp_path / room).mkdir()
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    found = violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(file)
    assert reason in found[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("parallel/comm.py", "import torch.distributed as dist\nfrom model.gpt2 import GPT2"),
        ("data/text/writer.py", "from megatron.core.datasets import indexed_dataset"),
        ("launch/cli.py", "from train.loop import train_loop\nimport torch"),
        ("model/mumoe/factorizations.py", "from ..attention import x\nfrom . import base"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert violations(tmp_path) == []


def test_no_module_has_the_name_of_one_that_python_has() -> None:
    names = {"logging.py", "types.py"}
    assert [p for room in ROOMS for p in (ROOT / room).rglob("*.py") if p.name in names] == []


def test_every_top_level_folder_says_what_belongs_there() -> None:
    for folder in (*ROOMS, "tests", "configs"):
        text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
        assert len(text) > 200, f"{folder}/README.md says too little"


def test_no_file_names_a_place_of_one_machine() -> None:
    # Paths of a home folder or a container, in the files that are shipped.
    place = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w")
    files = [p for room in (*ROOMS, "configs") for p in (ROOT / room).rglob("*") if p.is_file()]
    files += [*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*") if p.is_file())]
    files.append(ROOT / "Makefile")
    files += [ROOT / "pyproject.toml", ROOT / "CITATION.cff"]
    shipped = [p for p in files if p.suffix in {".py", ".md", ".yaml", ".toml", ".svg", ".cff", ""}]
    assert [str(p) for p in shipped if place.search(p.read_text(encoding="utf-8"))] == []
