"""`polyad`: parses the command and calls it; the packages below do the work.

Heavy imports are delayed until a command needs them, so that `polyad --help` is quick. For errors
and exit statuses see `launch/ending.py`.

Plugins are modules outside Polyad that add tasks, models and measures to its registries:

    POLYAD_PLUGINS=lab.spectra,lab.models polyad train spectra.yaml

A module is imported before any configuration is read, and adds entries to Polyad's registries:
`polyad.model.build.MODELS["mine"] = ModelKind(...)`, `polyad.train.tasks.registry.TASKS["mine"] =
...`, `polyad.train.measures.registry.MEASURES["mine"] = ...`. Processes that a command starts
inherit the variable.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from polyad.launch.command import UsageError, nearest
from polyad.launch.commands import COMMANDS, GROUPS
from polyad.launch.commands.experts import measure_of_plugin
from polyad.launch.ending import guard
from polyad.train.errors import ConfigError, one_line
from polyad.train.results import aligned

VARIABLE = "POLYAD_PLUGINS"
"""Names of modules, separated by commas."""


def main() -> NoReturn:
    """Runs `sys.argv` and exits with the status."""
    _open_streams()
    status = run(sys.argv[1:])
    communication = sys.modules.get("polyad.parallel.comm")
    if communication is not None:
        # The interpreter's normal shutdown may abort after gloo was used.
        communication.leave(status)
    sys.exit(status)


def _open_streams() -> None:
    """Opens the null device for standard streams that were closed, as by `>&-`.

    Otherwise the first file opened would get that descriptor, and the output of libraries.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w" if number else "r", encoding="utf-8")  # noqa: SIM115
            if stream.fileno() != number:
                os.dup2(stream.fileno(), number)
            setattr(sys, name, stream)


def run(argv: Sequence[str]) -> int:
    """Runs one command and reports errors.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit status, as listed in `train/errors.py`.
    """
    return guard(lambda: _dispatch(list(argv)))


def _dispatch(argv: Sequence[str]) -> int:
    load_plugins()
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    words = 2 if " ".join(argv[:2]) in COMMANDS else 1  # two words, as in `data verify`
    name = " ".join(argv[:words])
    if name in COMMANDS:
        return COMMANDS[name](argv[words:])
    if argv[:1] == ["experts"] and argv[1:] and os.environ.get(VARIABLE):
        from polyad.train.measures.registry import MEASURES

        if argv[1] in MEASURES:
            return measure_of_plugin(argv[1])(argv[2:])
    if name in {"", "help", "-h", "--help"}:
        print(_overview())
        return 0
    if name == "--version":
        print(f"polyad {_version()}")
        return 0
    group = [each for each in COMMANDS if each.startswith(f"{name} ")]  # a group like `checkpoint`
    if group and argv[1:2] in (["-h"], ["--help"]):
        print(_group_overview(name, group))
        return 0
    if group:
        wrong = f", not {argv[1]!r}" if argv[1:] else ""
        commands = ", ".join(each.removeprefix(f"{name} ") for each in group)
        raise UsageError(f"{name}: give one of the commands {commands}{wrong}")
    raise UsageError(f"unknown command {name!r}{nearest(name, COMMANDS)}")


def load_plugins() -> None:
    """Imports the modules named in the environment.

    Raises:
        ConfigError: one cannot be imported.
    """
    for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        try:
            importlib.import_module(name)
        except Exception as error:  # importing a plugin may raise anything
            raise ConfigError(
                f"{VARIABLE}: {name}: cannot be imported: {type(error).__name__}: "
                f"{one_line(error)}; the module has to be on Python's path (PYTHONPATH)"
            ) from None


def _listed(groups: Mapping[str, Sequence[str]]) -> str:
    """Formats names and summaries, aligned over all groups, each group below its title."""
    names = [name for group in groups.values() for name in group]
    lines = iter(aligned([(name, COMMANDS[name].summary) for name in names], "<"))
    parts = [
        "\n".join([f"{title}:", *(f"  {next(lines)}" for _ in group)])
        for title, group in groups.items()
    ]
    return "\n\n".join(parts)


def _group_overview(name: str, group: Sequence[str]) -> str:
    return f"""usage: polyad {name} COMMAND ...

{_listed({"commands": group})}

Run `polyad {group[0]} --help` for details of the first, and the same for the others."""


def _overview() -> str:
    groups = {title: [each.name for each in group] for title, group in GROUPS.items()}
    return f"""usage: polyad COMMAND ...

Trains mixture-of-experts models, and shows what their experts do.

{_listed(groups)}

Run `polyad help COMMAND` for details of a command, `polyad --version` for the version.

example:
  polyad prepare --source python-stdlib --tokenizer train:8192 --output runs/stdlib
  polyad launch configs/quickstart/gpt2.yaml --processes-per-node 2 data.path=runs/stdlib"""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("polyad")
    except PackageNotFoundError:
        return "(not installed)"
