"""One host's torchrun agent: names of hosts, its command line, and how this process becomes it."""

import ipaddress
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

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")


class LaunchError(ValueError):
    """An invalid option of `polyad launch`."""

    exit_status = 2


def host_name(text: str, option: str) -> str:
    """Checks the name or address of a host.

    Args:
        text: a name of RFC 1123 labels (section 2.1), or an IPv4 or IPv6 address without brackets.
        option: the option, for the error.

    Returns:
        The text, unchanged.

    Raises:
        LaunchError: it is neither, such as anything with a meaning for a shell.
    """
    if ":" in text and "%" not in text:
        try:
            return str(ipaddress.IPv6Address(text))
        except ValueError:
            pass
    elif len(text) <= 253 and all(_LABEL.fullmatch(label) for label in text.split(".")):
        return text
    raise LaunchError(
        f"{option}: {text!r} is not a host; give a name (letters, digits, dots, and dashes inside) "
        "or an address, as in node-1.cluster or 10.0.0.1"
    )


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
    bracketed = re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::([^:]*))?", text)
    if bracketed:
        host, port = bracketed[1], bracketed[2]
        return f"[{host_name(host, option)}]:{_port(port, option)}"
    if text.count(":") > 1:
        raise LaunchError(
            f"{option}: {text!r} is not HOST or HOST:PORT; an IPv6 address stands in brackets, as "
            f"in [::1]:{DEFAULT_PORT}"
        )
    host, colon, port = text.partition(":")
    return f"{host_name(host, option)}:{_port(port if colon else None, option)}"


def _port(text: str | None, option: str) -> int:
    if text is None:
        return DEFAULT_PORT
    if re.fullmatch(r"[0-9]{1,5}", text) and 1 <= int(text) <= MAX_PORT:
        return int(text)
    raise LaunchError(f"{option}: {text!r} is not a port; 1 to {MAX_PORT} is allowed")


def interface_name(text: str, option: str) -> str:
    """Checks the name of a network interface: at most 15 characters, as in Linux."""
    return _matching(_INTERFACE, text, option, "letters, digits, and _.- inside, at most 15")


def plain_name(text: str, option: str) -> str:
    """Checks a name that is used unquoted, such as a run's at a rendezvous."""
    return _matching(_NAME, text, option, "letters, digits, _, and .+- inside, at most 64")


def _matching(pattern: re.Pattern[str], text: str, option: str, allowed: str) -> str:
    if not pattern.fullmatch(text):
        raise LaunchError(f"{option}: {text!r} is not allowed; only {allowed}")
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
