"""Hosts, and text for shells and schedulers: names are checked, everything else is quoted.

Words of a command line are quoted (`command_line`). Names outside a shell, as in `#SBATCH` lines,
cannot be quoted and must match a pattern. A hostfile has a host and its processes in each line, as
in DeepSpeed and MPI.
"""

import ipaddress
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyad.train.errors import shown

MAX_PORT = 65535
DEFAULT_PORT = 29400
"""Default port of torchrun's c10d rendezvous."""

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_IMAGE = re.compile(r"[A-Za-z0-9/.][A-Za-z0-9._:/@#-]{0,254}")
_MOUNT = re.compile(r"(/[A-Za-z0-9_.-]+)+")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")
MOST_SLOTS = 1024
_SLOTS = re.compile(r"slots=([0-9]{1,5})")


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
        LaunchError: it is neither, such as anything with a meaning for a shell or `ssh`.
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
    """Checks a name that is used unquoted, such as a partition's, an account's or a job's."""
    return _matching(_NAME, text, option, "letters, digits, _, and .+- inside, at most 64")


def image_name(text: str) -> str:
    """Checks the value of `--image`: the name of a container image, or the path of its file."""
    return _matching(_IMAGE, text, "--image", "letters, digits, and ._/:@#- inside, at most 255")


def mount_path(text: str) -> str:
    """Checks the value of `--mount`: an absolute path that never needs quotes."""
    return _matching(_MOUNT, text, "--mount", "an absolute path of letters, digits, _.-")


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


@dataclass(frozen=True)
class HostSlots:
    """A line of a hostfile."""

    host: str
    slots: int | None
    """Number of processes that it can run; None if not given."""


def read_hostfile(path: Path) -> list[HostSlots]:
    """Reads a hostfile: lines of `HOST [slots=N]`; `#` starts a comment.

    Raises:
        LaunchError: it cannot be read, has no hosts, a duplicate, or a malformed line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LaunchError(f"--hostfile: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"--hostfile: {path} is not text") from None
    found: dict[str, HostSlots] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hostfile: {path}, line {number}"
        host = host_name(words[0], where)
        if host in found:
            raise LaunchError(f"{where}: {host!r} is listed twice; use one line per host")
        found[host] = HostSlots(host, _slots(words[1:], where))
    if not found:
        raise LaunchError(f"--hostfile: {path} names no host; lines have the form `HOST slots=N`")
    return list(found.values())


def _slots(words: list[str], where: str) -> int | None:
    if not words:
        return None
    match = _SLOTS.fullmatch(words[0])
    if len(words) > 1 or match is None:
        raise LaunchError(f"{where}: {shown(' '.join(words))} is not allowed after a host; slots=N")
    if not 1 <= int(match[1]) <= MOST_SLOTS:
        raise LaunchError(f"{where}: slots={match[1]} is not allowed; 1 to {MOST_SLOTS}")
    return int(match[1])


def chosen_hosts(
    hosts: list[HostSlots], path: Path, nodes: int | None, processes_per_node: int | None
) -> tuple[list[str], int]:
    """Returns the hosts of a run, and the number of processes per host.

    Args:
        hosts: the hosts in the file.
        path: the file, for errors.
        nodes: number of hosts to use, from the first; None: all.
        processes_per_node: None: the slots.

    Raises:
        LaunchError: there are fewer hosts or slots, or slots differ and no number is given.
    """
    if nodes is not None and nodes > len(hosts):
        raise LaunchError(f"--nodes: {nodes} is not allowed; {path} names only {len(hosts)} hosts")
    taken = hosts[:nodes]
    if processes_per_node is None:
        first = taken[0]
        for each in taken:
            if each.slots is None:
                raise LaunchError(
                    f"--processes-per-node: is missing, and {path} gives {each.host} no slots=N"
                )
            if each.slots != first.slots:
                raise LaunchError(
                    f"--hostfile: {path}: {each.host} has {each.slots} slots and {first.host} "
                    f"{first.slots}; all hosts of a run need the same number: make them equal, or "
                    "give --processes-per-node"
                )
        return [each.host for each in taken], first.slots or 1
    for each in taken:
        if each.slots is not None and each.slots < processes_per_node:
            raise LaunchError(
                f"--processes-per-node: {processes_per_node} is not allowed; {path} gives "
                f"{each.host} only {each.slots} slots"
            )
    return [each.host for each in taken], processes_per_node
