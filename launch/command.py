"""A command is one function: its parameters are its arguments, and their annotations the help.

    @command("checkpoint list", "polyad checkpoint list runs/quickstart/run")
    def checkpoint_list(
        folder: Annotated[Path, Argument("a run, or its checkpoints folder", "FOLDER")],
        *,
        json: Json = None,
    ) -> None:
        "Lists the checkpoints of a run: step, size, and whether one is damaged."

A parameter before the `*` is a word of the command line, one behind it an option of its name. A
parameter whose annotation is a dataclass stands for all of its fields, which several commands may
share. The docstring is what `--help` says of the command, its first line what the list of all says.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from polyad.launch.parser import Parser

Function = Callable[..., int | None]


@dataclass(frozen=True)
class Group:
    """A part of `--help` with a title of its own."""

    title: str
    about: str | None = None


@dataclass(frozen=True)
class Argument:
    """What `--help` says of a parameter, and how its text is read."""

    help: str | None = None
    metavar: str | tuple[str, ...] | None = None
    """What stands for the value; None: the allowed values, or the parameter's name."""
    parse: Callable[[str], Any] | None = None
    """Makes the value of the text; None: the annotation's type does."""
    _: KW_ONLY
    flag: str | None = None
    """The option's name, where it is not the parameter's."""
    nargs: str | int | None = None
    """How many words it takes, as argparse counts them; None: one."""
    const: Any = None
    """The value of an option that is given without a word, where `nargs` is `?`."""
    repeated: bool = False
    """Whether the option may be given several times; the value is the list of all."""
    group: Group | None = None
    one_of: str | None = None
    """A name that options share of which at most one may be given."""

    def within(self, group: Group) -> "Argument":
        """The same in a group."""
        return replace(self, group=group)


Json = Annotated[
    str | None, Argument("write the result to FILE as JSON; - is standard output", "FILE")
]
ConfigFile = Annotated[
    Path,
    Argument("a YAML file, or the name of one that comes with Polyad: gpt2/124m", "CONFIG"),
]
Overrides = Annotated[
    list[str],
    Argument("a key of the file, for example train.steps=100", "key=value", nargs="*"),
]


class _Parameter(NamedTuple):
    """An argument of the command line."""

    name: str
    annotation: Any
    default: Any
    is_option: bool


@dataclass(frozen=True)
class Command:
    """A function that the command line calls."""

    function: Function
    name: str
    """One word, or two as in `checkpoint list`."""
    examples: tuple[str, ...]
    """Lines for the end of `--help`."""
    program: str = "polyad "
    """What stands before the name."""

    @property
    def summary(self) -> str:
        """What the command does: the first line of the function's docstring."""
        return self._about.splitlines()[0]

    @property
    def _about(self) -> str:
        return inspect.getdoc(self.function) or ""

    def parser(self) -> Parser:
        """A parser of its arguments."""
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
            place.add_argument(*_names(each, about), **_keywords(each, about))
        return parser

    def __call__(self, words: Sequence[str]) -> int:
        """Runs the command.

        Args:
            words: of the command line, without the command's name.

        Returns:
            The exit status.

        Raises:
            UsageError: the words are not its arguments.
        """
        found = vars(self.parser().parse_intermixed_args(words))
        given = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            kind = parameter.annotation
            if dataclasses.is_dataclass(kind):
                fields = dataclasses.fields(kind)
                given[name] = kind(**{field.name: found[field.name] for field in fields})  # type: ignore[operator]
            else:
                given[name] = found[name]
        return self.function(**given) or 0


def command(name: str, *examples: str, program: str = "polyad ") -> Callable[[Function], Command]:
    """A decorator that makes a function a command.

    Args:
        name: as it is typed.
        examples: command lines for the end of `--help`.
        program: what is typed before the name.
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


def _names(parameter: _Parameter, about: Argument) -> tuple[str, ...]:
    if not parameter.is_option:
        return (parameter.name,)
    return (about.flag or f"--{parameter.name.replace('_', '-')}",)


def _keywords(parameter: _Parameter, about: Argument) -> dict[str, Any]:
    """What argparse is told of an argument."""
    kind = _without_none(get_args(parameter.annotation)[0])
    told: dict[str, Any] = {"help": about.help}
    if parameter.is_option:
        told |= {"dest": parameter.name}
        told |= {"default": parameter.default} if _has_default(parameter) else {"required": True}
    elif _has_default(parameter):
        told |= {"default": parameter.default}
    if kind is bool:
        return told | {"action": "store_true"}
    told |= {"metavar": about.metavar}
    if get_origin(kind) is Literal:
        told |= {"choices": get_args(kind)}
    else:
        told |= {"type": about.parse or _element(kind)}
    if about.repeated:
        told |= {"action": "append"}
        told |= {"default": list(parameter.default)} if _has_default(parameter) else {}
        return told | ({"nargs": about.nargs} if about.nargs else {})
    return told | {"nargs": about.nargs, "const": about.const}


def _has_default(parameter: _Parameter) -> bool:
    missing = (inspect.Parameter.empty, dataclasses.MISSING)
    return all(parameter.default is not each for each in missing)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(each for each in get_args(kind) if each is not types.NoneType)
    return kind


def _element(kind: Any) -> Callable[[str], Any] | None:
    """The type of a value, or of each of several; None: text, which argparse leaves as it is."""
    if get_origin(kind) is not None:
        kind = get_args(kind)[0]
    return None if kind is str else kind
