"""Hostfiles: a host and its processes in each line, as DeepSpeed and MPI write them."""

import re
from dataclasses import dataclass
from pathlib import Path

from polyad.launch.via.hosts import LaunchError, host_name
from polyad.train.errors import shown

MOST_SLOTS = 1024
_SLOTS = re.compile(r"slots=([0-9]{1,5})")


@dataclass(frozen=True)
class HostSlots:
    """A line of a hostfile."""

    host: str
    slots: int | None
    """Processes that it has room for; None where the line does not say."""


def read_hostfile(path: Path) -> list[HostSlots]:
    """Reads a hostfile: lines of `HOST [slots=N]`; `#` begins a comment.

    Args:
        path: the file.

    Raises:
        LaunchError: it cannot be read, has no host, one twice, or a line that is none.
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
            raise LaunchError(f"{where}: {host!r} stands there a second time; one line for a host")
        found[host] = HostSlots(host, _slots(words[1:], where))
    if not found:
        raise LaunchError(f"--hostfile: {path} names no host; a line is `HOST slots=N`")
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
    """The hosts of a run, and how many processes each of them has.

    Args:
        hosts: of the file.
        path: the file, for errors.
        nodes: the first so many of them; None: all.
        processes_per_node: None: the slots.

    Raises:
        LaunchError: there are fewer hosts, or slots, or slots differ and nobody says how many.
    """
    if nodes is not None and nodes > len(hosts):
        raise LaunchError(
            f"--nodes: {nodes} is not allowed; {path} names {len(hosts)} hosts; at most as many"
        )
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
                    f"{first.slots}; all hosts of a run have as many: make them equal, or say "
                    f"--processes-per-node"
                )
        return [each.host for each in taken], first.slots or 1
    for each in taken:
        if each.slots is not None and each.slots < processes_per_node:
            raise LaunchError(
                f"--processes-per-node: {processes_per_node} is not allowed; {path} gives "
                f"{each.host} {each.slots} slots; at most as many"
            )
    return [each.host for each in taken], processes_per_node
