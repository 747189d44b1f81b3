"""Writes the files of `configs/` from a base and deltas, so that a change of all is made once.

    make configs                                 # the same as: python -m tests.configs.writing

The source of `configs/FOLDER/NAME.yaml` is in `deltas/FOLDER.txt`: a line `=== NAME from OTHER`,
its head, and the lines in which it differs from that other file. `deltas/base.txt` has what most
files have, and is the other file where `from` is left out. In a delta

    key: value     # comment    replaces the other file's line
    key:                        without a value and a comment leaves the line, and changes below it
    !key                        leaves out the key of the other file and all below it

A key that the other file does not have stands behind the line that is before it in the delta, or
first where there is none. A section whose `kind` is another one is all in the delta.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CONFIGS, DELTAS = ROOT / "configs", Path(__file__).parent / "deltas"
BASE = "base"
SCHEMA = "# yaml-language-server: $schema=../polyad.schema.json"
_KEY = re.compile(r"( *)(?:((?:- )?\w+):|(!\w+)$)")
_TITLE = re.compile(r"=== (\S+)(?: from (\S+))?")


@dataclass
class Block:
    """A line of a configuration and those that are indented below it."""

    line: str = ""
    below: dict[str, "Block"] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """The lines below this one, in order."""
        for block in self.below.values():
            yield block.line
            yield from block.lines()

    def changed(self, delta: "Block") -> "Block":
        """This block as a delta has it."""
        if _kind(delta) not in (None, _kind(self)):
            return delta
        below = dict(self.below)
        before: str | None = None
        for name, block in delta.below.items():
            if name.startswith("!"):
                del below[name[1:]]
                continue
            if name not in below:
                below = _inserted(below, before, name, block)
            else:
                line = below[name].line if block.line.endswith(":") else block.line
                below[name] = Block(line, below[name].changed(block).below)
            before = name
        return Block(self.line, below)


class Source(NamedTuple):
    """What describes one file.

    Attributes:
        other: The file that it differs from.
        head: Comments at its top.
        delta: The lines in which it differs.
    """

    other: str
    head: list[str]
    delta: Block


def _kind(block: Block) -> str | None:
    """The value of a block's key `kind`; None where it has none."""
    return block.below["kind"].line.split()[1] if "kind" in block.below else None


def _inserted(
    below: dict[str, Block], before: str | None, name: str, block: Block
) -> dict[str, Block]:
    """The blocks with one more, behind a name; at the beginning without one."""
    names = list(below)
    place = 0 if before is None else names.index(before) + 1
    entries = list(below.items())
    return dict([*entries[:place], (name, block), *entries[place:]])


def parse(lines: list[str]) -> Block:
    """Reads lines by their indentation; blank ones are passed over."""
    root = Block()
    stack = [(-1, root)]
    for line in filter(None, lines):
        match = _KEY.match(line)
        if match is None:
            raise ValueError(f"no key in the line {line!r}")
        indent, name = len(match[1]), match[2] or match[3]
        while stack[-1][0] >= indent:
            stack.pop()
        block = Block(line)
        stack[-1][1].below[name] = block
        stack.append((indent, block))
    return root


def read_sources() -> dict[str, Source]:
    """Reads the base and all deltas, by the name of the file that they describe."""
    base = parse((DELTAS / f"{BASE}.txt").read_text(encoding="utf-8").splitlines())
    found = {BASE: Source("", [], base)}
    for path in sorted(set(DELTAS.glob("*.txt")) - {DELTAS / f"{BASE}.txt"}):
        lines = path.read_text(encoding="utf-8").splitlines()
        starts = [number for number, line in enumerate(lines) if _TITLE.fullmatch(line)]
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
            title = _TITLE.fullmatch(lines[start])
            part = lines[start + 1 : stop]
            head = [line for line in part if line.startswith("#")]
            delta = parse([line for line in part if not line.startswith("#")])
            found[f"{path.stem}/{title[1]}"] = Source(title[2] or BASE, head, delta)
    return found


def written(name: str, sources: dict[str, Source]) -> str:
    """The text of a file.

    Args:
        name: As `gpt2/124m`.
        sources: All of them.
    """
    lines = [SCHEMA, *sources[name].head]
    for block in _whole(name, sources).below.values():
        lines += ["", block.line, *block.lines()]
    return "\n".join(lines) + "\n"


def _whole(name: str, sources: dict[str, Source]) -> Block:
    source = sources[name]
    return _whole(source.other, sources).changed(source.delta) if source.other else source.delta


def main() -> int:
    """Writes all files whose text is another one; names them."""
    sources = read_sources()
    for name in sources.keys() - {BASE}:
        path, text = CONFIGS / f"{name}.yaml", written(name, sources)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
