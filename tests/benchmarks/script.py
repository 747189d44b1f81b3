"""What the scripts share: a command line made of a function, and how they end."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NoReturn

from polyad.launch.command import Argument, Command, Function, command, positive
from polyad.launch.ending import guard
from polyad.launch.processes import unblock_signals
from polyad.parallel import comm

Repeats = Annotated[int, Argument("timed runs of each; default %(default)s", "N", positive)]
Threads = Annotated[
    int | None, Argument("threads of each variant; default: PyTorch's own", "N", positive)
]
PrecisionOption = Annotated[Literal["fp32", "bf16"] | None, Argument("default: both")]
Device = Annotated[Literal["cpu", "cuda"], Argument("default cpu")]


def benchmark(name: str, *examples: str) -> Callable[[Function], Command]:
    """A decorator that makes a function the command of a script.

    Args:
        name: of the script's file.
        examples: options, each for a line at the end of `--help`.
    """
    program = "python -m tests.benchmarks."
    lines = (f"{program}{name} {options}".strip() for options in examples)
    return command(name, *lines, program=program)


def precisions(chosen: str | None) -> tuple[str, ...]:
    """The precisions that are measured: the one that was asked for, or both."""
    return (chosen,) if chosen else ("fp32", "bf16")


def run(script: Command, words: Sequence[str]) -> int:
    """Runs a script's command; an error is one line.

    Args:
        script: the command.
        words: of the command line.

    Returns:
        The exit status.
    """
    return guard(lambda: script(words))


def start(script: Command) -> NoReturn:
    """Runs a script's command on the command line, and ends the process."""
    unblock_signals()
    comm.leave(run(script, sys.argv[1:]))
