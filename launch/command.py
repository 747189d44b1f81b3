"""A command is one function: its parameters are its arguments, and their annotations the help.

    @command("checkpoint list", "polyad checkpoint list runs/quickstart/run")
    def checkpoint_list(
        folder: Annotated[Path, Argument("a run, or its checkpoints folder", "FOLDER")],
        *,
        json: Json = None,
    ) -> None:
        "Lists the checkpoints of a run: step, size, and whether one is damaged."

Parameters before the `*` are positional arguments, those after it options of the same name. A
parameter annotated with a dataclass stands for all of its fields, which several commands may share.
The docstring is the text of `--help`, and its first line the summary in the list of commands.
"""

import argparse
import dataclasses
import difflib
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

Function = Callable[..., int | None]


@dataclass(frozen=True)
class Group:
    """A section of `--help` with its own title."""

    title: str
    about: str | None = None


@dataclass(frozen=True)
class Argument:
    """The help of a parameter, and how its text is parsed."""

    help: str | None = None
    metavar: str | tuple[str, ...] | None = None
    """Placeholder for the value; None: the allowed values, or the parameter's name."""
    parse: Callable[[str], Any] | None = None
    """Parses the text; None: the annotation's type does."""
    _: KW_ONLY
    flag: str | None = None
    """The option's name, if it differs from the parameter's."""
    nargs: str | int | None = None
    """Number of words, as argparse's `nargs`; None: one."""
    repeated: bool = False
    """Whether the option may be given several times; the value is the list of all."""
    group: Group | None = None
    one_of: str | None = None
    """Name of a group of options, of which at most one may be given."""

    def within(self, group: Group) -> "Argument":
        """The same argument in a group."""
        return replace(self, group=group)


Json = Annotated[
    str | None, Argument("write the result to FILE as JSON; - is standard output", "FILE")
]
ConfigFile = Annotated[
    Path,
    Argument("a YAML file, or the name of one that ships with Polyad, such as gpt2/124m", "CONFIG"),
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


class _Parameter(NamedTuple):
    """An argument of the command line."""

    name: str
    annotation: Any
    default: Any
    is_option: bool

    @property
    def has_default(self) -> bool:
        missing = (inspect.Parameter.empty, dataclasses.MISSING)
        return all(self.default is not each for each in missing)


@dataclass(frozen=True)
class Command:
    """A function that is called from the command line."""

    function: Function
    name: str
    """One word, or two as in `checkpoint list`."""
    examples: tuple[str, ...]
    """Lines for the end of `--help`."""
    program: str = "polyad "
    """Text before the name."""

    @property
    def summary(self) -> str:
        """The summary: the first line of the function's docstring."""
        return self._about.splitlines()[0]

    @property
    def _about(self) -> str:
        return inspect.getdoc(self.function) or ""

    def parser(self) -> "Parser":
        """The parser of its arguments."""
        program = f"{self.program}{self.name}"
        parser = Parser(self.name, self._about, "\n".join(self.examples), program)
        groups: dict[object, Any] = {None: parser}
        for each in _parameters(self.function):
            about = get_args(each.annotation)[1]
            place: Any = groups.get(about.group)
            if place is None and about.group:
                place = parser.add_argument_group(about.group.title, about.group.about)
                groups[about.group] = place
            if about.one_of:
                if about.one_of not in groups:
                    groups[about.one_of] = place.add_mutually_exclusive_group()
                place = groups[about.one_of]
            option = about.flag or f"--{each.name.replace('_', '-')}"
            place.add_argument(option if each.is_option else each.name, **_keywords(each, about))
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
        found = self._parsed(words)
        given = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            kind = parameter.annotation
            if dataclasses.is_dataclass(kind):
                fields = dataclasses.fields(kind)
                given[name] = kind(**{field.name: found[field.name] for field in fields})  # type: ignore[operator]
            else:
                given[name] = found[name]
        return self.function(**given) or 0

    def _parsed(self, words: Sequence[str]) -> dict[str, Any]:
        try:
            return vars(self.parser().parse_intermixed_args(words))
        except AttributeError as error:
            # argparse restores what it may not have set yet, if Ctrl-C ends it there.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise


def command(name: str, *examples: str, program: str = "polyad ") -> Callable[[Function], Command]:
    """Returns a decorator that makes a function a command.

    Args:
        name: its name on the command line.
        examples: command lines for the end of `--help`.
        program: text before the name.
    """
    return lambda function: Command(function, name, examples, program)


def _parameters(function: Function) -> Iterator[_Parameter]:
    for name, parameter in inspect.signature(function).parameters.items():
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind):
            for field in dataclasses.fields(kind):
                yield _Parameter(field.name, field.type, field.default, True)
        else:
            is_option = parameter.kind is parameter.KEYWORD_ONLY
            yield _Parameter(name, kind, parameter.default, is_option)


def _keywords(parameter: _Parameter, about: Argument) -> dict[str, Any]:
    """Keyword arguments of argparse's `add_argument`."""
    kind = _without_none(get_args(parameter.annotation)[0])
    told: dict[str, Any] = {"help": about.help}
    if parameter.is_option:
        told["dest"] = parameter.name
    if parameter.has_default:
        told["default"] = list(parameter.default) if about.repeated else parameter.default
    elif parameter.is_option:
        told["required"] = True
    if kind is bool:
        return told | {"action": "store_true"}
    told["metavar"] = about.metavar
    if get_origin(kind) is Literal:
        told["choices"] = get_args(kind)
    else:
        told["type"] = about.parse or _element(kind)
    if about.repeated:
        told["action"] = "append"
    if about.nargs:
        told["nargs"] = about.nargs
    return told


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(each for each in get_args(kind) if each is not types.NoneType)
    return kind


def _element(kind: Any) -> Callable[[str], Any] | None:
    """The type of a value, or of each of several; None: text."""
    if get_origin(kind) is not None:
        kind = get_args(kind)[0]
    return None if kind is str else kind


class UsageError(ValueError):
    """An invalid command line."""

    exit_status = 2


class Parser(argparse.ArgumentParser):
    """The parser of one command, with one-line errors that name the nearest match.

    Options may occur anywhere.

    Args:
        command: its name.
        about: its description.
        example: lines for the end of `--help`.
        program: the words that call it.
    """

    def __init__(self, command: str, about: str, example: str, program: str) -> None:
        super().__init__(
            prog=program,
            description=about,
            epilog=f"example:\n{_indent(example)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._command = command

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage, so that all errors are handled alike.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{self._command}: {self._explain(message)}")

    def _explain(self, message: str) -> str:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is None:
            # argparse takes optional positional arguments for required ones.
            message = message.replace(", key=value", "")
            return f"{message} (see `{self.prog} --help`)"
        option = unknown[1]
        name, _, value = option.lstrip("-").partition("=")
        if re.fullmatch(r"\w+(\.\w+)+", name) and value:
            return f"unknown option {option}; keys have no dashes: {option.lstrip('-')}"
        return f"unknown option {option}{nearest(option, self._long_options())}"

    def _long_options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name."""
    dashes = {each.lstrip("-"): each for each in known}  # which would make all options similar
    close = difflib.get_close_matches(name.partition("=")[0].lstrip("-"), dashes, n=1, cutoff=0.6)
    listed = ", ".join(dashes.values())
    return f"; the nearest is {dashes[close[0]]}, of {listed}" if close else f"; there are {listed}"


def non_negative(text: str) -> int:
    """Parses a count that may be 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive(text: str) -> int:
    """Parses a count of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def share(text: str) -> float:
    """Parses a probability."""
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


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
