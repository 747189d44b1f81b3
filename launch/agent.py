"""One host's torchrun agent: names of hosts, its command line, and how this process becomes it."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from polyad.launch import torchrun as launcher
from polyad.launch.processes import block_signals, share_cores

STANDALONE = (launcher.STANDALONE,)
MAX_PORT = 65535
DEFAULT_PORT = 29400
"""Default port of torchrun's c10d rendezvous."""

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}|[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]+")
_ENDPOINT = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")


class LaunchError(ValueError):
    """An invalid option of `polyad launch`."""

    exit_status = 2


def host_name(text: str, option: str) -> str:
    """Checks the name of a host, or an IPv4 or IPv6 address without brackets.

    Args:
        text: the name.
        option: the option, for the error.

    Returns:
        The text, unchanged.

    Raises:
        LaunchError: it is neither, such as anything with a meaning for a shell.
    """
    return _matching(_HOST, text, option, "a host is, as in node-1.cluster or 10.0.0.1")


def endpoint(text: str, option: str) -> str:
    """Checks HOST or HOST:PORT, an IPv6 address in brackets.

    Args:
        text: the endpoint.
        option: the option, for the error.

    Returns:
        HOST:PORT.

    Raises:
        LaunchError: it is not a host and a port.
    """
    found = _ENDPOINT.fullmatch(text)
    port = int((found and found[2]) or DEFAULT_PORT)
    if not found or not 1 <= port <= MAX_PORT:
        raise LaunchError(
            f"{option}: {text!r} is not HOST or HOST:PORT, with a port from 1 to {MAX_PORT} and an "
            f"IPv6 address in brackets, as in [::1]:{DEFAULT_PORT}"
        )
    return f"{found[1]}:{port}"


def interface_name(text: str, option: str) -> str:
    """Checks the name of a network interface: at most 15 characters, as in Linux."""
    return _matching(_INTERFACE, text, option, "letters, digits, and _.- inside, at most 15, are")


def plain_name(text: str, option: str) -> str:
    """Checks a name that is used unquoted, such as a run's at a rendezvous."""
    return _matching(_NAME, text, option, "letters, digits, _, and .+- inside, at most 64, are")


def _matching(pattern: re.Pattern[str], text: str, option: str, allowed: str) -> str:
    if not pattern.fullmatch(text):
        raise LaunchError(f"{option}: {text!r} is not allowed; {allowed}")
    return text


def command_line(words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Returns a command that can be pasted into a shell.

    Args:
        words: the command's words; any text.
        environment: variables that it needs.

    Returns:
        One command, with words quoted where necessary.
    """
    assigned = [f"{name}={value}" for name, value in (environment or {}).items()]
    return shlex.join([*(["env", *assigned] if assigned else []), *words])


def torchrun(
    config: Path | None,
    overrides: Sequence[str],
    processes_per_node: int,
    max_restarts: int,
    *,
    command: Sequence[str] = ("train",),
    nodes: int = 1,
    min_nodes: int | None = None,
    meeting: Sequence[str] = STANDALONE,
) -> list[str]:
    """Returns the command line for a host's part of a run.

    Args:
        config: the run's configuration file; None: the command needs none.
        overrides: `key=value`.
        processes_per_node: P.
        max_restarts: maximum number of restarts after failures.
        command: a `polyad` command with its options.
        nodes: total number of hosts.
        min_nodes: minimum number of hosts when others are lost; None: all.
        meeting: torchrun's options for the rendezvous.

    Returns:
        The words; the first is this Python.
    """
    # A name that starts with a dash would be read as an option.
    file = [f"./{config}" if str(config).startswith("-") else str(config)] if config else []
    shape = str(nodes) if min_nodes is None else f"{min_nodes}:{nodes}"
    return [
        *(sys.executable, "-m", "polyad.launch.torchrun", *meeting),
        *(("--nnodes", shape) if tuple(meeting) != STANDALONE else ()),
        *("--nproc-per-node", str(processes_per_node), "--max-restarts", str(max_restarts)),
        *("-m", "polyad.launch", *command, *file, *overrides),
    ]


def become(words: list[str], variables: Mapping[str, str]) -> NoReturn:
    """Replaces this process by a command, which then receives the terminal's signals directly and
    determines the exit status.
    """
    os.environ.update(variables)
    sys.stdout.flush()
    sys.stderr.flush()
    block_signals()
    os.execv(sys.executable, words)


def become_processes(processes: int) -> NoReturn:
    """Replaces this process by torchrun, which runs the same command in P local processes."""
    share_cores(processes)
    become(torchrun(None, (), processes, 0, command=sys.argv[1:]), {})
