"""The walls of the house: who imports whom, and what every room has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# launch -> train -> parallel -> {data | model}
BELOW = {
    "model": set(),
    "data": set(),
    "parallel": {"model", "data"},
    "train": {"parallel", "model", "data"},
    "launch": {"train", "parallel", "model", "data"},
}
ROOMS = tuple(BELOW)
# Library -> room -> the module of it that the room may import. Nothing is allowed elsewhere.
COMMUNICATION = {
    "torch.distributed": {"parallel": "torch.distributed"},
    "deepspeed": {"parallel": "deepspeed"},
    "megatron": {"parallel": "megatron", "data": "megatron.core.datasets"},
}
Imports = dict[str, dict[str, int]]
"""By file, the modules that it may load, wherever the import stands, with their lines; ours without
the `polyad.` before them, as their folders are called."""


def imports_of(root: Path) -> Imports:
    """The imports of all files of the rooms."""
    found: Imports = {}
    for path in (path for room in ROOMS for path in sorted((root / room).rglob("*.py"))):
        relative = path.relative_to(root)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(relative))
        pairs = _imported(tree, relative.parent.parts)
        found[str(relative)] = {name.removeprefix("polyad."): line for name, line in pairs}
    return found


def _imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from torch import distributed` loads torch.distributed.
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = ast.unparse(node.func).removeprefix("importlib.")
            if name in {"__import__", "import_module"} and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def violations(imports: Imports) -> list[str]:
    """What breaks a wall, each as `file:line: reason`."""
    return [
        f"{file}:{line}: {file.partition('/')[0]} may not import {module}"
        for file, modules in imports.items()
        for module, line in modules.items()
        if not is_allowed(file.partition("/")[0], module)
    ]


def is_allowed(room: str, module: str) -> bool:
    top = module.partition(".")[0]
    if top == "tests" or (top in ROOMS and top not in BELOW[room] | {room}):
        return False
    return all(
        room in allowed and is_within(module, allowed[room])
        for library, allowed in COMMUNICATION.items()
        if is_within(module, library)
    )


def circle(imports: Imports) -> list[str]:
    """Files of which each imports the next, and the last the first; none: nothing."""
    files = {file.removesuffix(".py").replace("/", "."): file for file in imports}
    files |= {name.removesuffix(".__init__"): file for name, file in files.items()}
    # `from room.file import name` is given as room.file.name.
    left = {
        file: {files.get(m) or files.get(m.rpartition(".")[0]) for m in modules} - {file, None}
        for file, modules in imports.items()
    }
    while ends := [name for name, others in left.items() if not others & left.keys()]:
        for name in ends:
            del left[name]
    found: list[str] = []
    name = next(iter(left), None)
    while name is not None and name not in found:
        found.append(name)
        name = min(left[name] & left.keys())
    return found[found.index(name) :] if name is not None else []


def test_imports_go_down_only_and_no_two_files_import_each_other() -> None:
    imports = imports_of(ROOT)
    assert violations(imports) == []
    assert circle(imports) == []


# What is found: of a wall where, of a circle which files.
@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"model/a.py": "import os\nfrom data.prepare import prepare"}, ["model/a.py:2"]),
        ({"data/text/a.py": "def f():\n    import model.gpt2"}, ["data/text/a.py:2"]),
        ({"train/loop/a.py": "from torch import distributed"}, ["train/loop/a.py:1"]),
        ({"launch/a.py": "import importlib\nimportlib.import_module('megatron')"},
         ["launch/a.py:2"]),
        ({"data/text/a.py": "from megatron.core import parallel_state"}, ["data/text/a.py:1"]),
        ({"model/a.py": "from ..train import loop"}, ["model/a.py:1"]),
        ({"parallel/a.py": "import torch.distributed as dist\nfrom model.gpt2 import GPT2",
          "data/text/a.py": "from megatron.core.datasets import indexed_dataset",
          "model/b/a.py": "from ..attention import x\nfrom . import base",
          "train/a.py": "from train.b import train", "train/b.py": "import os"}, []),
        ({"train/a.py": "from train import b", "train/b.py": "def f():\n    import train.c",
          "train/c.py": "from .a import x", "train/d.py": "import train.a"},
         ["train/a.py", "train/b.py", "train/c.py"]),
    ],
)  # fmt: skip
def test_what_breaks_a_wall_is_found(
    tmp_path: Path, files: dict[str, str], found: list[str]
) -> None:
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    imports = imports_of(tmp_path)
    places = [line.partition(": ")[0] for line in violations(imports)]
    assert places + sorted(circle(imports)) == found


def test_no_module_has_the_name_of_one_that_python_has() -> None:
    names = {"logging.py", "types.py"}
    assert [p for room in ROOMS for p in (ROOT / room).rglob("*.py") if p.name in names] == []


def test_no_file_names_a_place_of_one_machine() -> None:
    # Paths of a home folder or a container, in the files that are shipped.
    place = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w")
    files = [p for room in (*ROOMS, "configs", "docs") for p in (ROOT / room).rglob("*")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.cff"), ROOT / "Makefile"]
    shipped = [p for p in files if p.suffix in {".py", ".md", ".yaml", ".toml", ".svg", ".cff", ""}]
    texts = {str(p): p.read_text(encoding="utf-8") for p in shipped if p.is_file()}
    assert [name for name, text in texts.items() if place.search(text)] == []
