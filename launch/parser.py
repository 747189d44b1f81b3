"""argparse with errors of one line that name the nearest match, and options anywhere."""

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

from polyad.train.config.faults import OURS, plain


class UsageError(ValueError):
    """A command line that cannot be understood."""

    exit_status = 2


class Parser(argparse.ArgumentParser):
    """The parser of one command.

    Args:
        command: its name.
        about: what it does.
        example: lines for the end of `--help`.
        program: what is typed to call it.
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
        """Raises instead of printing the usage, so that there is one way for errors.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{self._command}: {self._explain(message)}")

    def _explain(self, message: str) -> str:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is None:
            # argparse takes arguments that may be left out for required ones.
            message = message.replace(", key=value", "")
            return f"{message} (see `{self.prog} --help`)"
        option = unknown[1]
        name, _, value = option.lstrip("-").partition("=")
        if re.fullmatch(r"\w+(\.\w+)+", name) and value:
            return f"unknown option {option}; keys have no dashes: {option.lstrip('-')}"
        if plain(name) in OURS and any(a.dest == "overrides" for a in self._actions):
            key = f"{OURS[plain(name)]}={value or 'VALUE'}"
            return f"unknown option {option}; keys have no dashes: {key}"
        return f"unknown option {option}{nearest(option, self._long_options())}"

    def _long_options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about a name that is not known."""
    dashes = {each.lstrip("-"): each for each in known}  # which make all options alike
    close = difflib.get_close_matches(name.partition("=")[0].lstrip("-"), dashes, n=1, cutoff=0.6)
    listed = ", ".join(dashes.values())
    return f"; the nearest is {dashes[close[0]]}, of {listed}" if close else f"; there are {listed}"


def non_negative(text: str) -> int:
    """The type of a count on the command line that may be 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive(text: str) -> int:
    """The type of a count on the command line."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def share(text: str) -> float:
    """The type of a probability on the command line."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:  # NaN is not
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


def names(text: str) -> list[str]:
    """The type of a list on the command line: words between commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, as in 0,5")
    return words


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
