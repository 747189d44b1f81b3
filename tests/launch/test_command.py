"""A command is a function: its annotations are the arguments, and old flags name new commands."""

import shlex
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
from polyad.launch.commands.old_flags import in_new_words

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


@pytest.mark.parametrize(
    ("words", "name", "new"),
    [
        (["run", "--split", "test"], "evaluate", "run --split test"),
        (["run", "--knockout", "--help"], "evaluate", "run --knockout --help"),
        (
            ["--compare=other", "run", "--data", "d", "--probe-tokens", "9", "x=1"],
            "compare",
            "run --data d x=1 --with other --tokens=9",
        ),
        (["run", "--specialization", "--best"], "experts specialize", "run --best"),
        (
            ["run", "--knockout", "--layers", "0,3", "--weights", "ema"],
            "experts knockout",
            "run --layers=0,3 --weights=ema",
        ),
        (
            ["run", "--knockout", "--steer", "layer=1", "--steer=layer=2"],
            "experts steer",
            "run --steer=layer=1 --steer=layer=2",
        ),
        (["run", "--rewrite", "class=1"], "experts rewrite", "run --move class=1"),
        (
            ["run", "--robustness", "v2", "some where", "--split", "validation"],
            "robustness",
            "run --set v2 --images 'some where'",
        ),
    ],
)
def test_old_flags_of_evaluate_say_what_to_type(
    words: list[str], name: str, new: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert in_new_words(words) == (name, shlex.split(new))
    said = capfd.readouterr().err
    if name == "evaluate":
        assert said == ""
    else:
        assert said.count("\n") == 1
        assert said.endswith(f": polyad {name} {new}\n")
