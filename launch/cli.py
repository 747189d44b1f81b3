"""`polyad`: finds what a command means and calls it; the work is done in the rooms below.

Nothing heavy is imported before a command is known to need it: `polyad --help` is to be quick.
How a command ends is said in `train/errors.py`.
"""

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from launch.commands import COMMANDS
from launch.machine import is_main, rank_of_process
from launch.parser import Parser, UsageError, nearest
from launch.signals import hear_no_more, stop_at_signals, unblock_signals
from launch.torchrun import tell_launcher
from train.errors import Stopped, one_line

OUTPUT_ERRORS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
        *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
        *(errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTEMPTY),
    }
)
"""What a file system refuses: the user's to mend, so one line and no traceback."""

TRAINING = frozenset({"train", "launch", "study"})
"""Commands that a signal ends in order: what they have done is saved, and a line says so."""

RANK_ZERO_SPEAKS_FIRST = 2.0
"""Seconds another rank waits with its error: torchrun ends it if rank 0 has failed as well."""


def main() -> NoReturn:
    """Runs `sys.argv` and ends the process with the status."""
    if not TRAINING.isdisjoint(sys.argv[1:2]) and "RANK" not in os.environ:
        stop_at_signals()  # one of several processes cannot end alone before it has met the others
    unblock_signals()
    status = run(sys.argv[1:])
    communication = sys.modules.get("parallel.comm")
    if communication is not None:
        # The interpreter's own shutdown may abort once gloo has run.
        communication.leave(status)
    sys.exit(status)


def run(argv: Sequence[str]) -> int:
    """Runs one command and says what went wrong.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit status, as `train/errors.py` lists them.
    """
    return guard(lambda: _dispatch(argv))


def guard(work: Callable[[], int]) -> int:
    """Turns however something ends into an exit status, and an error into its one line.

    Args:
        work: gives the status itself if it comes to its end.

    Returns:
        The exit status.
    """
    try:
        return work()
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
    except KeyboardInterrupt as stop:
        hear_no_more()
        if is_main():
            _say("; ".join(["interrupted", *map(str, stop.args)]))
        return 0 if tell_launcher(signal.SIGINT) else 130
    except Stopped as stop:
        hear_no_more()
        if is_main():
            _say(str(stop))
        return 0 if tell_launcher(stop.exit_status - 128) else stop.exit_status
    except BrokenPipeError:  # the reader of our output has gone, as in `polyad validate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        return _report(error)


def _dispatch(argv: Sequence[str]) -> int:
    words = 2 if " ".join(argv[:2]) in COMMANDS else 1  # two, as in `bench data`
    name = " ".join(argv[:words])
    if name in COMMANDS:
        command = COMMANDS[name]
        parser = Parser(name, command.summary, command.example)
        command.arguments(parser)
        return command.handler(parser.parse_intermixed_args(argv[words:])) or 0
    if name in {"-h", "--help"}:
        print(_overview())
        return 0
    if name == "--version":
        print(f"polyad {_version()}")
        return 0
    group = [each for each in COMMANDS if each.startswith(f"{name} ")]  # as `bench` is
    if group and argv[1:2] in (["-h"], ["--help"]):
        print(_group_overview(name, group))
        return 0
    if group:
        wrong = f", not {argv[1]!r}" if argv[1:] else ""
        commands = ", ".join(each.removeprefix(f"{name} ") for each in group)
        raise UsageError(f"{name}: one of {commands} is needed{wrong}")
    if not name:
        raise UsageError(f"a command is needed: {', '.join(COMMANDS)} (see `polyad --help`)")
    raise UsageError(f"unknown command {name!r}{nearest(name, COMMANDS)}")


def _report(error: Exception) -> int:
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        _say(str(error))
        return status
    if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{where}{error.strerror}")
        return 2 if error.errno == errno.ENAMETOOLONG else 1
    if rank_of_process():  # often only the echo of rank 0's end, which torchrun then answers
        time.sleep(RANK_ZERO_SPEAKS_FIRST)
    traceback.print_exc()
    return 1


def _say(message: str) -> None:
    """One line on standard error, from rank 0; from another one only if rank 0 has none."""
    rank = rank_of_process()
    if rank:
        time.sleep(RANK_ZERO_SPEAKS_FIRST)
        message = f"rank {rank}: {message}"
    print(f"polyad: error: {one_line(message)}", file=sys.stderr, flush=True)


def _listed(names: Sequence[str]) -> str:
    width = max(len(name) for name in names)
    return "\n".join(f"  {name:{width}}  {COMMANDS[name].summary}" for name in names)


def _group_overview(name: str, group: Sequence[str]) -> str:
    return f"""usage: polyad {name} COMMAND ...

commands:
{_listed(group)}

`polyad {group[0]} --help` explains the first of them."""


def _overview() -> str:
    return f"""usage: polyad COMMAND ...

Trains mixture-of-experts transformers.

commands:
{_listed(list(COMMANDS))}

`polyad COMMAND --help` explains one of them; `polyad --version` prints the version.

example:
  polyad prepare --source python-stdlib --tokenizer train:8192 --output runs/stdlib
  polyad launch configs/quickstart/gpt2.yaml --processes-per-node 2 data.path=runs/stdlib"""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("polyad")
    except PackageNotFoundError:
        return "(not installed)"
