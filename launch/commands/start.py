"""The first commands of a newcomer: the quickstart, and what a shell completes."""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from polyad.launch.command import Argument, Command, command


@command("quickstart", "polyad quickstart", "polyad quickstart --images digits")
def quickstart(
    *,
    images: Annotated[
        str | None,
        Argument("train on images in place of text: digits, or a source as of `prepare`", "SOURCE"),
    ] = None,
) -> int:
    """Trains a small mixture of experts here, from raw data to a score: minutes on two cores.

    Everything is written below runs/quickstart, or runs/quickstart-images. A quickstart that was
    interrupted continues when it is started again.
    """
    from polyad.launch.quickstart import main

    return main(images)


def completion_of(commands: Callable[[], Mapping[str, Command]]) -> Command:
    """The command that prints what a shell completes.

    Args:
        commands: All commands by name, this one among them.
    """

    @command("completion", "polyad completion bash > polyad.bash")
    def completion(
        shell: Annotated[Literal["bash", "zsh", "fish", "tcsh"], Argument("the shell")],
    ) -> None:
        """Prints a script with which a shell completes commands, options and files.

        bash: `source polyad.bash` in ~/.bashrc. zsh: a file `_polyad` in a folder of $fpath. fish:
        a file `polyad.fish` in ~/.config/fish/completions.
        """
        import shtab

        sys.stdout.write(shtab.complete(_parser(commands()), shell) + "\n")

    return completion


def _parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """One parser of all commands; a group's commands are below its first word."""
    parser = argparse.ArgumentParser("polyad")
    groups = {"": parser.add_subparsers()}
    for name, each in commands.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group, help=f"{group} ...").add_subparsers()
        arguments = each.parser()
        groups[group].add_parser(last, parents=[arguments], help=each.summary, add_help=False)
    return parser
