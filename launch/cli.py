"""`polyad`: parses the command and calls it; the packages below do the work.

Heavy imports are delayed until a command needs them, so that `polyad --help` is quick. The end of a
command becomes an exit status, and its error one line.

Plugins are modules outside Polyad that add tasks, models and measures to its registries:

    POLYAD_PLUGINS=lab.spectra,lab.models polyad train spectra.yaml

A module is imported before any configuration is read, and adds entries to Polyad's registries:
`polyad.model.build.MODELS["mine"] = ModelKind(...)`, `polyad.train.tasks.registry.TASKS["mine"] =
...`, `polyad.train.measures.registry.MEASURES["mine"] = ...`. Processes that a command starts
inherit the variable.
"""

import errno
import importlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from polyad.launch.command import Command, UsageError, nearest
from polyad.launch.commands import COMMANDS, GROUPS
from polyad.launch.commands.held_out import measure_of_plugin
from polyad.launch.processes import ignore_further_signals, is_main, rank_of_process
from polyad.train.errors import (
    OUTPUT_ERRORS,
    SAID_ABOVE,
    ConfigError,
    Stopped,
    one_line,
    tell_launcher,
)
from polyad.train.results import aligned

VARIABLE = "POLYAD_PLUGINS"
"""Names of modules, separated by commas."""
OTHERS_SPEAK_FIRST = 5.0
"""Seconds for which a process delays its error for that of the first process of its host."""

_PEER_ENDED = re.compile(r"gloo/\S+\] (.*?Connection (?:closed|reset) by peer)|ncclRemoteError")


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
    count = 2 if " ".join(argv[:2]) in COMMANDS else 1  # two words, as in `data verify`
    name = " ".join(argv[:count])
    if name in COMMANDS:
        return COMMANDS[name](argv[count:])
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
        words = " ".join(argv[:2])
        near = nearest(words, group) if argv[1:] else ""
        near = near or f"; give one of {', '.join(each.split()[1] for each in group)}"
        raise UsageError(f"{words}: there is no such command{near}")
    near = nearest(name, [*COMMANDS, *(each.split()[0] for each in COMMANDS)])
    near = near or "; `polyad --help` lists them"
    raise UsageError(f"{name}: there is no such command{near}")


def load_plugins() -> None:
    """Imports the modules named in the environment.

    Raises:
        ConfigError: one cannot be imported.
    """
    for name in os.environ.get(VARIABLE, "").replace(",", " ").split():
        try:
            importlib.import_module(name)
        except Exception as error:  # importing a plugin may raise anything
            raise ConfigError(
                f"{VARIABLE}: {name}: cannot be imported: {type(error).__name__}: "
                f"{one_line(error)}; the module has to be on Python's path (PYTHONPATH)"
            ) from None


def _group_overview(name: str, group: Sequence[str]) -> str:
    rows = aligned([(f"  {each}", COMMANDS[each].summary) for each in group], "<")
    last = f"`polyad help {group[0]}` explains the first, and the same the others."
    return "\n".join([f"usage: polyad {name} COMMAND ...", "", *rows, "", last])


def _overview() -> str:
    lines: list[str] = []
    rows = [row for group in GROUPS.values() for row in _rows(group)]
    width = max(len(name) for name, _ in rows)
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:{width}}  {about}" for name, about in _rows(group))]
    return "\n".join(
        [
            "usage: polyad COMMAND ...",
            "",
            "Trains mixture-of-experts models, and shows what their experts do.",
            "",
            *lines,
            "",
            "`polyad help COMMAND` explains a command, `polyad --version` prints the version.",
            "",
            "example:",
            "  polyad prepare --source python-stdlib --tokenizer train:8192 --output runs/stdlib",
            "  polyad launch configs/quickstart/gpt2.yaml --processes-per-node 2 "
            "data.path=runs/stdlib",
        ]
    )


def _rows(group: Sequence[Command]) -> list[tuple[str, str]]:
    """Names and summaries; commands that begin with the same word have one row."""
    named: dict[str, list[Command]] = {}
    for each in group:
        named.setdefault(each.name.split()[0], []).append(each)
    return [
        (first, ", ".join(each.name.split()[1] for each in same))
        if len(same) > 1
        else (same[0].name, same[0].summary)
        for first, same in named.items()
    ]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("polyad")
    except PackageNotFoundError:
        return "(not installed)"


def guard(work: Callable[[], int]) -> int:
    """Runs a command's work; converts its end to an exit status, and errors to one line.

    Args:
        work: returns the status if there is no error.

    Returns:
        The exit status.
    """
    try:
        return work()
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
    except KeyboardInterrupt as stop:
        return _stop(signal.SIGINT, "; ".join(["interrupted", *map(str, stop.args)]))
    except Stopped as stop:
        return _stop(stop.exit_status - 128, str(stop))
    except BrokenPipeError:  # the output's reader has exited, as in `polyad validate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        return _report(error)


def _stop(number: int, line: str) -> int:
    """Ends a command that was stopped by a signal; returns its status."""
    ignore_further_signals()
    if is_main() and SAID_ABOVE not in os.environ:
        print(f"polyad: {one_line(line)}", file=sys.stderr, flush=True)
    return 0 if tell_launcher(number) else 128 + number


def _report(error: Exception) -> int:
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        _say(str(error))
        return status
    if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{where}{error.strerror}")
        return 2 if error.errno == errno.ENAMETOOLONG else 1
    if line := _peer_ended(error):
        _say(line)
        return 1
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        _say(f"{one_line(str(error))}; data.num_workers=0 reads in the training process")
        return 1
    _let_others_speak()
    traceback.print_exc()
    return 1


def _peer_ended(error: BaseException | None) -> str | None:
    """One line if an error is gloo's or NCCL's about a lost peer; else None."""
    while error is not None:
        if isinstance(error, RuntimeError) and (match := _PEER_ENDED.search(str(error))):
            return (
                f"another process of this run ended while this one waited for it "
                f"({match[1] or match[0]}): its own output, or that of what started it, says why"
            )
        error = error.__cause__ or error.__context__
    return None


def _say(message: str) -> None:
    """Prints an error in one line on standard error."""
    _let_others_speak()
    rank = rank_of_process()
    name = f"rank {rank}: " if rank else ""
    print(f"polyad: error: {name}{one_line(message)}", file=sys.stderr, flush=True)


def _let_others_speak() -> None:
    """Waits, except in the first process of a host: often all fail, or because of another.

    The launcher ends a process while it waits, if another one of its host has ended.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHERS_SPEAK_FIRST)
