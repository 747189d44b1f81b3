"""A command is a function or a dataclass: its annotations and its docstring are the arguments."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from polyad.launch.command import Argument, Command, Json, Positive, command


@dataclass(frozen=True, kw_only=True)
class Gait:
    """Options that several commands could share.

    Args:
        stops (PLACE): where.
    """

    pace: Annotated[Literal["walk", "run"], Argument("on legs")] = "walk"
    stops: Sequence[str] = ()
    by_day: bool = False


def going() -> tuple[Command, list[dict[str, Any]]]:
    """A command, and what it was called with."""
    calls = []

    @command("go there", "polyad go there 3 here --pace run")
    def go(
        times: Positive,
        places: Annotated[list[Path], Argument("where", "PLACE", nargs="*")],
        gait: Gait,
        *,
        with_: str,
        speed: float | None = None,
        json: Json = None,
    ) -> int:
        """Goes to places.

        More of it.

        Args:
            times: how
                often.
            with_ (WHOM): whom.
        """
        calls.append(dict(locals()))
        return times

    return go, calls


def test_a_dataclass_is_a_command_with_the_options_of_its_bases():
    calls = []

    @dataclass(frozen=True, kw_only=True)
    class Going(Gait):
        """Goes.

        Args:
            goal: whereto.
        """

        goal: Path = field(kw_only=False)
        pace: Literal["walk", "run"] = "run"

        def run(self) -> None:
            """Goes."""
            calls.append(self)

    going = command("go", "polyad go home")(Going)
    assert going(["home", "--stops", "inn"]) == 0
    assert calls == [Going(Path("home"), stops=["inn"])]
    text = going.parser().format_help()
    assert all(words in text for words in ("whereto", "--stops PLACE"))
    assert "Args" not in text


def test_words_and_options_are_those_of_the_signature():
    go, calls = going()
    words = ["--with", "her", "2", "a", "--speed", "5", "--stops", "x", "b", "--stops=y"]
    assert go([*words, "--by-day"]) == 2
    assert calls[0].items() >= {
        "times": 2, "places": [Path("a"), Path("b")], "with_": "her", "speed": 5.0,
        "json": None,
        "gait": Gait(pace="walk", stops=["x", "y"], by_day=True),
    }.items()  # fmt: skip
    text = go.parser().format_help()
    for words in (
        "Goes to places.",
        "More of it.",
        "how often\n",
        "--with WHOM ",
        "--stops PLACE ",
    ):
        assert words in text, words
