"""Links between documents, and the files that documents name, lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.written import PAGES, ROOT, markdown_files

FILES = markdown_files()
NAMED = re.compile(r"`([\w.-]+(?:/[\w.-]+)*\.(?:py|c|h|md|yaml|sh))`")
"""A file between marks. `report.json` and the like are of a run and stand in no folder here."""
OF_A_RUN = {"config.yaml", "launch/job.sh", "launch/job.yaml"}
"""Names between marks that are files of a run, not of this repository."""


def lines_of_prose(text: str) -> Iterator[str]:
    """Without blocks of code, fenced or indented behind a blank line."""
    fenced, blank, code = False, True, False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        code = line.startswith("    ") and (blank or code)
        blank = not line.strip()
        if not fenced and not code:
            yield line


def links(text: str) -> list[str]:
    """Where the links and pictures of a document lead, without those to other sites."""
    prose = re.sub(r"`[^`\n]*`", "", "\n".join(lines_of_prose(text)))
    found = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: set[str] = set()
    for line in lines_of_prose(text):
        if heading := re.match(r"#+ (.*)", line):
            name = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            name = re.sub(r"[^\w\- ]", "", name).replace(" ", "-")
            same = sum(bool(re.fullmatch(rf"{re.escape(name)}(-\d+)?", one)) for one in found)
            found.add(f"{name}-{same}" if same else name)
    return found


def broken_links(path: Path) -> list[str]:
    """The links of a document that lead nowhere."""
    found = []
    for target in links(path.read_text(encoding="utf-8")):
        place, _, anchor = target.partition("#")
        file = (path.parent / place).resolve() if place else path
        if not file.exists():
            found.append(f"{path}: {target}: there is no such file")
        elif anchor and file.is_dir():
            found.append(f"{path}: {target}: a folder has no headings")
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            found.append(f"{path}: {target}: {file.name} has no such heading")
    return found


def unknown_files(path: Path, root: Path = ROOT) -> list[str]:
    """Files between marks that are neither below the document's folder nor below the root.

    A name without a folder may be of any file below the document's folder, or of the root.
    """
    found = []
    for name in NAMED.findall("\n".join(lines_of_prose(path.read_text(encoding="utf-8")))):
        if (path.parent / name).exists() or (root / name).exists() or name in OF_A_RUN:
            continue
        rooms = [one for one in path.parent.iterdir() if one.is_dir() and one.name[0] != "."]
        if "/" not in name and any(next(room.rglob(name), None) for room in rooms):
            continue
        found.append(f"{path}: `{name}`: there is no such file")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_and_every_file_that_is_named_exists(path: Path) -> None:
    assert broken_links(path) + unknown_files(path) == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "file.py").touch()
    (tmp_path / "b.md").write_text("# What `x` *is*\n\n## Twice\n\n## Twice\n\n    # no heading\n")
    page = tmp_path / "a.md"
    rows = {
        "[fine](b.md#what-x-is) [fine](b.md#twice-1) [fine](room) ![](room/file.py)": [],
        "[fine](https://example.org/x.md) `[code](none.md)` `room/file.py` `file.py`": [],
        "[x](none.md) [x](b.md#twice-2)": ["none.md", "b.md#twice-2"],
        "[x](b.md#no-heading) [x](room#x)": ["b.md#no-heading", "room#x"],
        "`room/none.py` `none.py`": ["room/none.py", "none.py"],
    }
    for text, expected in rows.items():
        page.write_text(text)
        found = broken_links(page) + unknown_files(page, tmp_path)
        assert [line.split(": ")[1].strip("`") for line in found] == expected


def test_the_pages_of_docs_are_those_of_the_navigation() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(PAGES)
    assert len(pages) == len(PAGES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_and_lines_are_short(path: Path) -> None:
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    is_page = name in ("README.md", *PAGES)
    assert not is_page or len(text.split()) <= 1200
    wide = [line for line in text.splitlines() if len(line) > 120]
    assert [line for line in wide if is_page or line[0] != "|"] == []


def test_the_root_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
