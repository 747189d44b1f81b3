"""Builds the documentation site: `make docs`, or `python docs/site.py OUTPUT`.

All Markdown files of the repository are pages, with the links between them as they stand; files
that they link to are copied. Notebooks become pages too. The reference is made of the code:
configuration keys, commands, the Python interface. Any broken link fails.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polyad
from polyad.launch.cli import run
from polyad.launch.commands import COMMANDS, GROUPS
from polyad.train.config.run import RunConfig
from polyad.train.config.text import Section, sections
from polyad.train.study import StudyConfig

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = Path("docs/reference")
NOTEBOOKS = Path("docs/notebooks")
SETTINGS = """
INHERIT: {root}/docs/mkdocs.yml
docs_dir: {source}
site_dir: {output}
markdown_extensions:
  toc:
    slugify: !!python/object/apply:pymdownx.slugs.slugify {{kwds: {{case: lower}}}}
"""
"""Anchors are those of GitHub."""
STYLE, WORKER = Path("docs/site.css"), Path("docs/worker.js")
SHIM = "https://unpkg.com/iframe-worker/shim"
"""The script for search on a disk that the theme would load, in place of which `WORKER` is."""
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
LINK_TO_NOTEBOOK = re.compile(r"(\]\([^)\s#]+)\.ipynb\b")


def main(output: Path) -> None:
    """Gathers the pages in a folder of its own, and has mkdocs build them."""
    with TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        for path in pages():
            copy(path, source)
        for name, text in (notebooks() | reference()).items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(text, encoding="utf-8")
        for path in (STYLE, WORKER):
            shutil.copy(ROOT / path, source / path)
        file = Path(folder) / "mkdocs.yml"
        settings = SETTINGS.format(root=ROOT, source=source, output=output.resolve())
        file.write_text(settings + repository(), encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(file)]
        environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # of an incompatible successor
        subprocess.run(command, env=environment, check=True)
    for page in output.rglob("*.html"):
        worker = os.path.relpath(output / WORKER, page.parent)
        page.write_text(page.read_text(encoding="utf-8").replace(SHIM, worker), encoding="utf-8")


def repository() -> str:
    """The setting with the address of this clone's origin; empty if it has none on the web."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    address = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f"repo_url: {address}\n" if address.startswith("https://") else ""


def pages() -> list[Path]:
    """All Markdown files but those of hidden folders and of environments."""
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(path for path in paths if not path.parts[0].startswith(".") and is_ours(path))


def is_ours(path: Path) -> bool:
    """Whether a path is none of the folders that Git ignores, or links to others."""
    return path.parts[0] not in ("runs", "build", "site", "gpu-check", "gpu-speed", "src")


def copy(page: Path, source: Path) -> None:
    """Copies a page, and the files that it links to."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (source / page).parent.mkdir(parents=True, exist_ok=True)
    (source / page).write_text(to_pages(text), encoding="utf-8")
    for target in LINK.findall(text):
        path = (ROOT / page).parent / target
        is_page = path.suffix in (".md", ".ipynb")
        if not re.match("[a-z]+:", target) and path.is_file() and not is_page:
            place = source / path.resolve().relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)


def to_pages(text: str) -> str:
    """A text whose links to notebooks lead to their pages."""
    return LINK_TO_NOTEBOOK.sub(r"\1.md", text)


def notebooks() -> dict[Path, str]:
    """The pages that are made of notebooks, by their places."""
    paths = sorted((ROOT / NOTEBOOKS).glob("*.ipynb"))
    return {NOTEBOOKS / f"{path.stem}.md": to_pages(notebook_page(path)) for path in paths}


def notebook_page(path: Path) -> str:
    """The text of a notebook, with its code in blocks; outputs are left out."""
    first, *rest = json.loads(path.read_text(encoding="utf-8"))["cells"]
    note = f"This page is the notebook `{NOTEBOOKS / path.name}`, without outputs."
    return "\n\n".join([cell_page(first), note, *map(cell_page, rest)]) + "\n"


def cell_page(cell: dict[str, Any]) -> str:
    """A cell of a notebook as a part of a page."""
    text = "".join(cell["source"])
    return f"```python\n{text}\n```" if cell["cell_type"] == "code" else text


def reference() -> dict[Path, str]:
    """The pages that are made of the code, by their places."""
    return {
        REFERENCE / "keys.md": keys_page("Configuration keys", RunConfig),
        REFERENCE / "study-keys.md": keys_page("Keys of a study", StudyConfig),
        REFERENCE / "commands.md": commands_page(),
        REFERENCE / "python.md": python_page(),
    }


def keys_page(title: str, kind: type[RunConfig] | type[StudyConfig]) -> str:
    """Every section of a file, with a table of its keys."""
    parts = [f"# {title}", "`polyad keys SECTION` prints the same."]
    return "\n\n".join([*parts, *(section_text(each) for each in sections(kind))]) + "\n"


def section_text(section: Section) -> str:
    """A heading, what the section is for, and a table of its keys."""
    lines = [f"## {section.title}", "", section.about]
    if len(section.places) > 1:
        others = ", ".join(f"`{place}`" for place in section.places[1:])
        lines += ["", f"Also allowed at {others}."]
    lines += ["", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key in section.keys:
        cells = (f"`{key.name}`", key.type, f"`{key.default}`", key.meaning)
        lines.append(f"| {' | '.join(cell_text(cell) for cell in cells)} |")
    return "\n".join(lines)


def cell_text(text: str) -> str:
    """A text as the cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands_page() -> str:
    """The help of every command."""
    parts = ["# Commands", "`polyad help COMMAND` prints the same."]
    for title, group in GROUPS.items():
        parts.append(f"## {title.capitalize()}")
        parts += [f"### polyad {each.name}\n\n```text\n{help_of(each.name)}```" for each in group]
    return "\n\n".join(parts) + "\n"


def help_of(name: str) -> str:
    """What `polyad NAME --help` prints."""
    assert name in COMMANDS
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run([*name.split(), "--help"])
    return printed.getvalue()


def python_page() -> str:
    """The public names of the package; mkdocstrings puts in their signatures and docstrings."""
    parts = ["# Python"]
    for name in sorted(polyad.__all__, key=lambda name: (name != "load", name != "Run", name)):
        place = f"{getattr(polyad, name).__module__}.{name}"
        parts.append(f"::: {place}\n    options:\n      heading: polyad.{name}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder of the site; it is made anew")
    main(parser.parse_args().output)
