"""The commands in documents, help texts and configurations, as written.

Documents are all Markdown files: READMEs, the pages of `docs/`, BENCHMARKS.md. `documents` and
`help_commands` return commands in order; `World` tracks what each of them reads and makes.
"""

import contextlib
import importlib
import io
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from polyad.data.sequences.config import BENCHMARKS
from polyad.launch.cli import run
from polyad.launch.command import Command, Parser
from polyad.launch.commands import COMMANDS
from polyad.launch.commands.options import weights_folder
from polyad.model.decoder import DecoderSettings
from polyad.train.config.run import load_config
from polyad.train.study import StudyConfig

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = "tests.benchmarks."
"""What the names of measurements begin with, as in `python -m tests.benchmarks.layer`."""
SCRIPTS = ("checkpoint", "images", "layer", "routing", "step")
PROGRAMS = ("polyad", "torchrun", "python", "make", "tensorboard")
"""First words that make a block of text one of commands. Every line of it is one then."""
PATHS = frozenset({"DIR", "FILE", "FOLDER", "PATH", "RUN", "CHECKPOINT", "CHECKPOINT_OR_RUN"})
"""Metavars of arguments that are paths."""
SITE = ROOT / "docs/mkdocs.yml"
MADE = ("docs/reference/", "docs/notebooks/")
"""Folders of pages that docs/site.py makes: they are in the navigation alone."""
MAKES = frozenset({"output", "json", "figure", "page", "destination", "trace", "html"})
"""Arguments that name what a command makes; it reads every other path."""
USED_UP = "stream"
"""The argument that names what is there between two calls of a command alone."""


def pages_of(nav: Any) -> Iterator[str]:
    """The files of a part of the site's navigation, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


PAGES = tuple(
    page
    for page in pages_of(yaml.safe_load(SITE.read_text(encoding="utf-8"))["nav"])
    if page.startswith("docs/") and not page.startswith(MADE)
)
"""The pages of docs/ in the order of a reader: a page may use what one before it makes."""


def from_data(path: Path, size: int) -> list[str]:
    """What the data would say in a configuration: its vocabulary or classes, or nothing."""
    model = load_config(path).model
    left = model.left_to_data()
    words = [f"{left}={size}"] if left else []
    if isinstance(model, DecoderSettings) and model.reads_documents():
        words.append(f"model.end_of_text_id={size - 1}")
    return words


@dataclass(frozen=True)
class Written:
    """A command, where it stands."""

    place: str
    text: str

    @property
    def words(self) -> list[str]:
        """As a shell hands them over, a redirection among them."""
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def markdown_files() -> list[Path]:
    """All documents: the root README, the pages of docs/, the rest of the root, and the folders."""
    paths = [
        path for path in ROOT.rglob("*.md") if not path.relative_to(ROOT).parts[0].startswith(".")
    ]
    return sorted(paths, key=_reading_order)


def _reading_order(path: Path) -> tuple[int, int, str]:
    place = str(path.relative_to(ROOT))
    if place == "README.md":
        return 0, 0, ""
    if place.startswith("docs/"):
        assert place in PAGES, f"{place} is not in the navigation of {SITE}"
        return 1, PAGES.index(place), ""
    return place.count("/") + 2, path.name != "README.md", place


def documents() -> list[Written]:
    """The commands of all documents, as a reader goes."""
    return [command for path in markdown_files() for command in commands_of_markdown(path)]


def commands_of_markdown(path: Path) -> list[Written]:
    """The commands of a file's code blocks, indented or fenced.

    Raises:
        AssertionError: a block of commands has a line that begins with another program.
    """
    place, found = str(path.relative_to(ROOT)), []
    for block in _blocks(path.read_text(encoding="utf-8")):
        lines = [line for line in _joined(block) if not line.startswith("#")]
        if not any(line.split()[0] in PROGRAMS for line in lines):
            continue
        for line in lines:
            assert line.split()[0] in PROGRAMS, f"{place}: {line!r} is no command that is known"
            found.append(Written(place, line))
    return found


def _blocks(text: str) -> Iterator[list[str]]:
    block: list[str] = []
    fenced = False
    for line in [*text.splitlines(), "end"]:
        fence = line.lstrip().startswith("```")
        if (fenced and not fence) or (not fenced and (line.startswith("    ") or not line)):
            block.append(line)
            continue
        if block:
            yield block
        block, fenced = [], fenced != fence


def _joined(lines: Sequence[str]) -> list[str]:
    """Without blank lines, a line that goes on in the next one with it."""
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [line.strip() for line in text.splitlines() if line.strip()]


def commands_of_config(path: Path) -> list[Written]:
    """The commands in the head of a configuration, which stand behind `# Command`."""
    head = path.read_text(encoding="utf-8").partition("\n\n")[0]
    block = re.search(r"^# Command (.*(?:\n# {9,}.*)*)", head, re.M)
    assert block, f"{path}: its head has no command"
    lines = _joined([line.removeprefix("# ") for line in block[1].splitlines()])
    place = str(path.relative_to(ROOT))
    commands = [line for line in lines if line.split()[0] in PROGRAMS]  # others explain them
    return [Written(place, line.partition(", or by hand")[0]) for line in commands]


def by_hand(words: Sequence[str]) -> list[Written] | None:
    """What a quickstart does; None of another command."""
    made = {
        "make quickstart": "configs/quickstart/gpt2-smoe.yaml",
        "make quickstart-images": "configs/quickstart/vmoe.yaml",
    }
    config = made.get(" ".join(words))
    return None if config is None else commands_of_config(ROOT / config)[1:]


def help_commands() -> dict[str, list[Written]]:
    """The examples of `polyad --help`; those of all commands; and those of measurements."""
    each = [Written("Makefile", f"make quickstart{kind}") for kind in ("", "-images")]
    each += [command for name in COMMANDS for command in _examples(*name.split())]
    measured = [command for name in SCRIPTS for command in _examples_of_script(name)]
    return {"polyad --help": _examples(), "polyad COMMAND --help": each, "measurements": measured}


def _examples(*command: str) -> list[Written]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run([*command, "--help"]) == 0
    place = " ".join(["polyad", *command, "--help"])
    return [Written(place, line) for line in _joined(said.getvalue().partition("example:")[2:])]


def _examples_of_script(name: str) -> list[Written]:
    place = f"python -m {BENCHMARK}{name} --help"
    return [Written(place, line) for line in script(f"{BENCHMARK}{name}").examples]


def script(module: str) -> Command:
    """The command of a measurement."""
    name = module.removeprefix(BENCHMARK)
    assert name in SCRIPTS, f"there is no script {module!r}"
    found: Command = getattr(importlib.import_module(module), name)
    return found


def inline_commands() -> list[Written]:
    """What stands in documents between `marks` within a line; often only the part that matters."""
    ours = re.compile(rf"`((?:polyad |python -m {BENCHMARK})[^`]+)`")
    return [
        Written(str(path.relative_to(ROOT)), text)
        for path in markdown_files()
        for text in ours.findall(path.read_text(encoding="utf-8"))
    ]


def polyad_words(words: Sequence[str]) -> list[str] | None:
    """What `polyad` is given, also by torchrun; what a measurement is given, with its module; None
    of another program.
    """
    if words[0] == "polyad":
        return list(words[1:])
    if list(words[:2]) == ["python", "-m"] and words[2].startswith(BENCHMARK):
        return list(words[2:])
    if words[0] == "torchrun" or list(words[:3]) == ["python", "-m", "polyad.launch.torchrun"]:
        return list(words[words.index("polyad.launch") + 1 :])
    return None


def parser_of(words: Sequence[str]) -> tuple[str, Parser, list[str]]:
    """The command of these words, its parser, and what is left for that."""
    if words[0].startswith(BENCHMARK):
        return words[0], script(words[0]).parser(), list(words[1:])
    count = 2 if " ".join(words[:2]) in COMMANDS else 1
    name = " ".join(words[:count])
    assert name in COMMANDS, f"there is no command {name!r}"
    return name, COMMANDS[name].parser(), list(words[count:])


def parsed(words: Sequence[str]) -> tuple[str, Parser, Namespace]:
    """A command line of `polyad`, parsed as `polyad` does it.

    Raises:
        UsageError: it cannot be.
    """
    name, parser, rest = parser_of(words)
    return name, parser, parser.parse_intermixed_args(rest)


class World:
    """The files made by the commands so far, in a folder that was a fresh clone at first.

    Args:
        root: where the configurations are.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._made: set[str] = set()
        self._steps: dict[str, set[int]] = {}
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        """Paths that the last command reads and makes, or goes on with."""

    def follow(self, command: Written) -> None:
        """Checks that all that a command reads is there, and remembers what it makes.

        Raises:
            AssertionError: something is not.
            ValueError: the command line or a key is wrong.
        """
        self.reads, self.writes = set(), set()
        words = command.words
        if ">" in words:
            self._make(words[words.index(">") + 1])
            words = words[: words.index(">")]
        given = polyad_words(words)
        if given is None or by_hand(words):
            self._other(words)
            return
        name, parser, options = parsed(given)
        for path in _paths(parser, options, made=False):
            self._read(path)
        if name in ("train", "launch"):
            is_started = name == "train" or (not options.dry_run and options.via == "local")
            self._train(options.config, options.overrides, is_started)
        if name == "doctor" and options.config is not None:
            self._train(options.config, options.overrides, is_started=False)
        if name == "validate" and not options.without_data:
            self._train(options.config, options.overrides, is_started=False)
        if name == "bench" and self._is_left_to_data(options):
            self._train(options.config, options.overrides, is_started=False)
        if name == "study":
            self._study(options.study, is_started=not options.dry_run)
        if name == "prepare" and options.part is not None:
            return  # a step before the one that makes it
        for path in _paths(parser, options, made=True):
            new = name in ("prepare", "convert", "experts trace")
            assert not (new and self._is_there(path)), f"{path} is there"
            self._make(path)

    def _other(self, words: Sequence[str]) -> None:
        """Programs that are not ours."""
        reads, writes = set[str](), set[str]()
        for command in by_hand(words) or []:
            self.follow(command)
            reads, writes = reads | self.reads, writes | self.writes
        self.reads, self.writes = reads, writes
        read = r"(?:--logdir |checkpoint=|recipes/\w+\.py |load\(\")([^\s,\"]+)"
        for path in re.findall(read, " ".join(words)):
            self._read(path)
        for path in re.findall(r'Path\("([^"]+)', " ".join(words)):  # a line of Python
            self._make(path)

    def _is_left_to_data(self, options: Namespace) -> bool:
        config = load_config(self._root / options.config, options.overrides)
        return config.model.left_to_data() is not None

    def _train(self, path: Path, overrides: Sequence[str], is_started: bool) -> None:
        config = load_config(self._root / path, overrides)
        mixed = getattr(config.data, "mixture", None) or ()
        for source in [config.data.path, *(one.path for one in mixed)]:
            # Those are on the hub, in scikit-learn or a user's own.
            if source not in (None, *BENCHMARKS, "digits", "my-images", "domainbed/PACS") and (
                not source.startswith("hub:")
            ):
                self._read(source)
        for source in (config.checkpoint.init_from, config.distill.teacher):
            if source is not None:
                self._read(str(source))
        if is_started:
            folder, last, every = config.run.folder, config.train.steps, config.checkpoint.every
            if folder not in self._steps:  # `polyad train` refuses a folder of something else
                inside = [path for path in self._made if path.startswith(f"{_normal(folder)}/")]
                assert not inside, f"run.folder: {folder} holds {inside[0]}, which is not its own"
            self._make(folder)
            saved = {last, *(range(every, last, every) if every else ())}
            self._steps.setdefault(folder, set()).update(saved)

    def _study(self, path: Path, *, is_started: bool) -> None:
        study = StudyConfig.model_validate(yaml.safe_load((self._root / path).read_text()))
        self._read(study.base)
        if is_started:
            data = load_config(self._root / study.base).data.path
            self._read(study.common.get("data.path", data))
            runs = [f"runs/{variant}/seed-{s}" for variant in study.variants for s in study.seeds]
            for name in ("results.json", *runs):
                self._make(f"{study.folder}/{name}")

    def made(self) -> list[str]:
        """The paths that have to be there by now, checkpoints among them."""
        saved = [(run, step) for run, steps in self._steps.items() for step in sorted(steps)]
        return sorted(self._made) + [f"{run}/checkpoints/step-{step:08d}" for run, step in saved]

    def _make(self, path: str) -> None:
        self.writes.add(_normal(path))
        self._made.add(_normal(path))

    def _read(self, path: str) -> None:
        self.reads.add(_normal(path))
        assert self._is_there(path), f"{path}: no command before this one makes it"

    def _is_there(self, path: str) -> bool:
        path = _normal(path)
        if path == ".":
            return True
        if re.match(r"configs/", path):
            return (self._root / path).exists()
        run, found, name = path.partition("/checkpoints/")
        if found:
            return _step(name) in self._steps.get(run, ())
        # What was made, what is in it, and the folder that it is in.
        return _overlap({path}, self._made)


def needed_for(place: str) -> list[Written]:
    """The commands of a document, and those before it that make what they read, in order.

    Args:
        place: the document, as `Written.place` has it.
    """
    everything, world = documents(), World()
    last = max(number for number, one in enumerate(everything) if one.place == place)
    kept, wanted, each = [], set[str](), []
    for command in everything[: last + 1]:
        world.follow(command)
        each.append((command, world.reads, world.writes))
    for command, reads, writes in reversed(each):
        if command.place == place or _overlap(writes, wanted):
            kept.append(command)
            wanted |= reads | writes
    return kept[::-1]


def _overlap(some: set[str], others: set[str]) -> bool:
    """Whether a path of one is, holds, or is in a path of the other."""
    return any(
        one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")
        for one in some
        for other in others
    )


def _paths(parser: Parser, options: Namespace, *, made: bool) -> list[str]:
    """The paths that a command line names: what it makes, or what it reads."""
    found = []
    for action in parser._actions:
        value: Any = getattr(options, action.dest, None)
        each = [str(one) for one in (value if isinstance(value, list) else [value])]
        is_path = action.type in (Path, weights_folder) or action.metavar in PATHS
        found += [
            one
            for one in each
            if (action.dest in MAKES) == made
            and action.dest not in (USED_UP, "part")
            and value not in (None, action.default)
            and (is_path or ("/" in one and "=" not in one))
            and one != "-"
        ]
    return found


def _normal(path: str) -> str:
    return str(Path(path))


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
