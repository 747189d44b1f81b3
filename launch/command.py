"""A command is a function or a dataclass: its parameters are its arguments, its docstring the help.

    @command("experts prune", "polyad experts prune runs/quickstart/run runs/smaller --keep 0.5")
    @dataclass(frozen=True, kw_only=True)
    class Prune(CheckpointOptions):
        \"\"\"Writes a sparse mixture with fewer experts, and reports what that costs.

        Args:
            output (DIR): folder to create, in the same format.
            keep: fraction of the experts of every layer to keep, below 1.
        \"\"\"

        output: Path = field(kw_only=False)
        keep: Share

        def run(self) -> None: ...

Parameters that are keyword-only are options, the others positional arguments; the name of one that
would be a keyword of Python ends in `_`. The first line of the docstring is the summary in the list
of commands, and a word in brackets after a parameter's name the placeholder for its value. Texts
and parsers that several commands share stand in an `Argument` of an annotation.

Results go to standard output, everything else to standard error.
"""

import argparse
import difflib
import inspect
import json
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TextIO, Union, get_args, get_origin

from polyad.data.files import write_whole
from polyad.launch.processes import prepare_environment
from polyad.train.results import json_value

Function = Callable[..., Any]
_ARGUMENT = re.compile(r"^ {4}(\w+)(?: \((\S+)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)
"""An argument of a docstring: its name, its placeholder, its text."""
_PLACEHOLDERS = {int: "N", float: "X", Path: "PATH"}


@dataclass(frozen=True)
class Argument:
    """The help of a parameter, and how its text is parsed."""

    help: str | None = None
    metavar: str | tuple[str, ...] | None = None
    """Placeholder for the value; None: by the type."""
    parse: Callable[[str], Any] | None = None
    """Parses the text; None: the annotation's type does."""
    nargs: str | int | None = None
    """Number of words, as argparse's `nargs`; None: by the type."""

    def over(self, other: "Argument") -> "Argument":
        """Returns the same, with what it leaves open from another."""
        return Argument(*(a or b for a, b in zip(astuple(self), astuple(other), strict=True)))


def non_negative(text: str) -> int:
    """Parses a count that may be 0."""
    return _number(text, 0)


def positive(text: str) -> int:
    """Parses a count of at least 1."""
    return _number(text, 1)


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def share(text: str) -> float:
    """Parses a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:  # NaN is not
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


def names(text: str) -> list[str]:
    """Parses a comma-separated list of words."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, as in 0,5")
    return words


Positive = Annotated[int, Argument(metavar="N", parse=positive)]
NonNegative = Annotated[int, Argument(metavar="N", parse=non_negative)]
Share = Annotated[float, Argument(metavar="X", parse=share)]
Names = Annotated[Sequence[str], Argument(metavar="N,N,...", parse=names)]
Json = Annotated[
    str | None, Argument("write the result to FILE as JSON; - is standard output", "FILE")
]
ConfigFile = Annotated[
    Path,
    Argument(
        "a YAML file, the name of one that ships with Polyad, such as gpt2/124m, or a run, which "
        "is continued",
        "CONFIG",
    ),
]
ConfigOrFolder = Annotated[
    Path,
    Argument(
        "a YAML file, the name of one that ships with Polyad, or a checkpoint, a run or a folder "
        "of weights that training would continue from",
        "CONFIG",
    ),
]
Overrides = Annotated[
    list[str],
    Argument(
        "overrides a key of the configuration, for example train.steps=100; `polyad keys` explains "
        "all keys",
        "key=value",
        nargs="*",
    ),
]


@dataclass(frozen=True)
class Command:
    """A function or dataclass that is called from the command line."""

    function: Function
    name: str
    """One word, or two as in `checkpoint list`."""
    examples: tuple[str, ...]
    """Lines for the end of `--help`."""
    program: str = "polyad "
    """Text before the name."""

    @property
    def summary(self) -> str:
        """The summary: the first line of the docstring."""
        return _about(self.function).partition("\n")[0]

    def parser(self) -> "Parser":
        """The parser of its arguments."""
        parser = Parser(self)
        texts = _texts(self.function)
        added = [
            _arguments(each, texts.get(each.name, Argument()))
            for each in inspect.signature(self.function).parameters.values()
        ]
        # Words that are left over go to the last positional argument.
        for name, keywords in sorted(added, key=lambda each: each[1].get("nargs") == "*"):
            parser.add_argument(name, **keywords)
        return parser

    def __call__(self, words: Sequence[str]) -> int:
        """Runs the command.

        Args:
            words: the words after the command's name.

        Returns:
            The exit status.

        Raises:
            UsageError: the words are not valid arguments.
        """
        prepare_environment()  # before the function imports libraries
        done = self.function(**vars(self.parser().parse_intermixed_args(words)))
        return (done.run() if isinstance(self.function, type) else done) or 0


def command(name: str, *examples: str, program: str = "polyad ") -> Callable[[Function], Command]:
    """Returns a decorator that makes a function or a dataclass with `run` a command.

    Args:
        name: its name on the command line.
        examples: command lines for the end of `--help`.
        program: text before the name.
    """
    return lambda function: Command(function, name, examples, program)


def _about(function: Function) -> str:
    return re.split(r"\n\n(?:Args|Returns|Raises):\n", inspect.getdoc(function) or "")[0]


def _texts(function: Any) -> dict[str, Argument]:
    """The arguments that docstrings explain: its own, and those of base classes."""
    texts = dict[str, Argument]()
    for documented in reversed(getattr(function, "__mro__", (function,))):
        arguments = inspect.cleandoc(documented.__doc__ or "").partition("\nArgs:\n")[2]
        for name, metavar, text in _ARGUMENT.findall(arguments.partition("\n\n")[0]):
            texts[name] = Argument(" ".join(text.split()).removesuffix("."), metavar or None)
    return texts


def _arguments(parameter: inspect.Parameter, text: Argument) -> tuple[str, dict[str, Any]]:
    """The first and the keyword arguments of argparse's `add_argument`."""
    kind, about = _type(parameter.annotation)
    about = text.over(about)
    is_option = parameter.kind is parameter.KEYWORD_ONLY
    has_default = parameter.default is not parameter.empty
    words: dict[str, Any] = {"help": about.help}
    name = parameter.name
    if is_option:
        name = f"--{name.removesuffix('_').replace('_', '-')}"
        words |= {"dest": parameter.name, "required": not has_default}
    if has_default:
        words["default"] = parameter.default
    if kind is bool:
        return name, words | {"action": "store_true"}
    origin = get_origin(kind)
    is_list = isinstance(origin, type) and issubclass(origin, Sequence)
    element = get_args(kind)[0] if is_list else kind
    if get_origin(element) is Literal:
        words["choices"] = get_args(element)
    elif about.parse or element is not str:
        words["type"] = about.parse or element
    words["metavar"] = about.metavar or _PLACEHOLDERS.get(element)
    if about.nargs:
        words["nargs"] = about.nargs
    elif is_option and is_list and about.parse is None:
        words |= {"action": "append", "default": list(parameter.default) if has_default else None}
    elif not is_option and (is_list or has_default):
        words["nargs"] = "+" if is_list else "?"
    return name, words


def _type(annotation: Any) -> tuple[Any, Argument]:
    """The type of an annotation without None, and what it says of the argument."""
    about = Argument()
    while True:
        if get_origin(annotation) is Annotated:
            for each in reversed(annotation.__metadata__):
                about = about.over(each)
            annotation = annotation.__origin__
        elif get_origin(annotation) in (Union, types.UnionType):
            annotation = next(each for each in get_args(annotation) if each is not type(None))
        else:
            return annotation, about


class UsageError(ValueError):
    """An invalid command line."""

    exit_status = 2


def refuse_others(command: Any, beside: str, allowed: Collection[str]) -> None:
    """Refuses options that mean nothing beside another one.

    Args:
        command: a dataclass of options.
        beside: the option that is given, for the error.
        allowed: names of those that may be given beside it, and its own.

    Raises:
        UsageError: names the first other option whose value is not its default.
    """
    for each in fields(command):
        value = getattr(command, each.name)
        if each.name not in allowed and value and value != each.default:
            name = f"--{each.name.removesuffix('_').replace('_', '-')}"
            other = value[0] if each.name == "overrides" else name
            raise UsageError(f"{other}: means nothing with {beside}")


class Parser(argparse.ArgumentParser):
    """The parser of one command, with one-line errors that name the nearest match.

    Options may occur anywhere.

    Args:
        command: the command.
    """

    def __init__(self, command: Command) -> None:
        examples = textwrap.indent("\n".join(command.examples), "  ")
        super().__init__(
            prog=f"{command.program}{command.name}",
            description=_about(command.function),
            epilog=f"example:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._command = command.name

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage, so that all errors are handled in one place.

        Raises:
            UsageError: always.
        """
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is None:
            # argparse takes optional positional arguments for required ones.
            message = f"{message.replace(', key=value', '')} (see `{self.prog} --help`)"
            raise UsageError(f"{self._command}: {message}")
        option = unknown[1]
        near = nearest(option, self._option_string_actions)
        if not near and any(each.dest == "overrides" for each in self._actions):
            key, _, value = option.lstrip("-").partition("=")
            near = f"; keys have no dashes: {key}={value or 'VALUE'}"
        near = near or f"; `{self.prog} --help` lists them"
        raise UsageError(f"{self._command}: unknown option {option}{near}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name; empty if none is near."""
    dashes = {each.lstrip("-"): each for each in known}  # which would make all options similar
    close = difflib.get_close_matches(name.partition("=")[0].lstrip("-"), dashes, n=1, cutoff=0.6)
    return f"; the nearest is {dashes[close[0]]}" if close else ""


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
