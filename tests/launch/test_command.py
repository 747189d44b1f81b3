"""A command is a function: its annotations are the arguments."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from polyad.launch.command import (
    Argument,
    Command,
    Group,
    Json,
    Parser,
    UsageError,
    command,
    positive,
)

SPEED = Group("how fast", "Of legs.")


@dataclass(frozen=True, kw_only=True)
class Gait:
    """Options that several commands could share."""

    pace: Annotated[Literal["walk", "run"], Argument("on legs", group=SPEED)] = "walk"
    stops: Annotated[Sequence[str], Argument("where", "PLACE", repeated=True, group=SPEED)] = ()
    by_day: Annotated[bool, Argument("by day", one_of="time")] = False
    by_night: Annotated[bool, Argument("by night", one_of="time")] = False


def going() -> tuple[Command, list[dict[str, Any]]]:
    """A command, and what it was called with."""
    calls = []

    @command("go there", "polyad go there 3 here --pace run")
    def go(
        times: Annotated[int, Argument("how often", "N", positive)],
        places: Annotated[list[Path], Argument("where", "PLACE", nargs="*")],
        gait: Gait,
        *,
        with_whom: Annotated[str, Argument("whom", flag="--with")],
        speed: Annotated[float | None, Argument("km/h", "X")] = None,
        json: Json = None,
    ) -> int:
        """Goes to places.

        More of it.
        """
        calls.append(dict(locals()))
        return times

    return go, calls


def test_ctrl_c_while_words_are_parsed_stops_as_at_any_other_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, calls = going()
    usage = Parser.format_usage

    def interrupted(parser: Parser) -> str:
        signal.raise_signal(signal.SIGINT)  # before argparse has set what it restores
        return usage(parser)

    monkeypatch.setattr(Parser, "format_usage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(["--with", "her", "2", "a"])
    assert not calls


def test_words_and_options_are_those_of_the_signature() -> None:
    go, calls = going()
    words = ["--with", "her", "2", "a", "--speed", "5", "--stops", "x", "b", "--stops=y"]
    assert go([*words, "--by-night"]) == 2
    assert calls[0].items() >= {
        "times": 2, "places": [Path("a"), Path("b")], "with_whom": "her", "speed": 5.0,
        "json": None,
        "gait": Gait(pace="walk", stops=["x", "y"], by_night=True),
    }.items()  # fmt: skip


def test_help_has_the_docstring_and_every_argument() -> None:
    go, _ = going()
    text = go.parser().format_help()
    assert text.startswith("usage: polyad go there [-h]")
    for words in (
        "Goes to places.", "N                  how often", "--with WITH_WHOM",
        "how fast:\n  Of legs.", "--pace {walk,run}", "example:\n  polyad go there 3 here",
    ):  # fmt: skip
        assert words in text, words
    assert "More of it." in text
    assert go.summary == "Goes to places."


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["1"], "go there: the following arguments are required: --with"),
        (["0", "--with", "x"], "'0' is not a whole number of at least 1"),
        (["1", "--with", "x", "--pace", "fly"], "invalid choice: 'fly'"),
        (["1", "--with", "x", "--by-day", "--by-night"], "not allowed with argument --by-day"),
        (["1", "--wiht", "x"], "required: --with"),
        (["1", "--with", "x", "--sped", "1"], "unknown option --sped; the nearest is --speed"),
    ],
)
def test_wrong_words_are_one_error(words: list[str], error: str) -> None:
    go, calls = going()
    with pytest.raises(UsageError) as caught:
        go(words)
    assert error in str(caught.value)
    assert calls == []
