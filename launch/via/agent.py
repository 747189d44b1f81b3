"""One host's torchrun: the words that start its processes, and where it meets the other hosts."""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from polyad.launch import torchrun as launcher
from polyad.launch.machine import prepare_environment, share_cores
from polyad.launch.via.hosts import endpoint, host_name, plain_name

STANDALONE = (launcher.STANDALONE,)


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the agents of all hosts meet (torchrun's c10d rendezvous).

    torchrun's static rendezvous cannot start a run again after a failure; this one can.

    Raises:
        LaunchError: a value is not a host, port or name.
    """

    endpoint: str | None = None
    """HOST or HOST:PORT, the same on every host; None for a single host."""
    id: str | None = None
    """Distinguishes runs that meet at one endpoint; None: made from the run's folder."""
    is_host: bool | None = None
    """Whether the endpoint is on this host; None: torchrun compares names and addresses."""
    local_addr: str | None = None
    """The address by which other hosts reach this one; None: its full name."""

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            endpoint(self.endpoint, "--rdzv-endpoint")
        if self.id is not None:
            plain_name(self.id, "--rdzv-id")
        if self.local_addr is not None:
            host_name(self.local_addr, "--local-addr")

    def name(self, run_folder: str) -> str:
        """The id of the meeting.

        Args:
            run_folder: as the configuration writes it, so that every host makes the same id of it.
        """
        return self.id or f"polyad-{hashlib.sha256(run_folder.encode()).hexdigest()[:12]}"

    def tell_others(self, run_folder: str, line: str) -> None:
        """Tells the agents of other hosts why this host starts none."""
        if self.endpoint is not None:
            from polyad.parallel.agents import tell_agents

            host, _, port = endpoint(self.endpoint, "--rdzv-endpoint").rpartition(":")
            tell_agents(host.strip("[]"), int(port), self.name(run_folder), line)

    def words(self, run_folder: str) -> list[str]:
        """torchrun's options; see `name`."""
        where = endpoint(self.endpoint, "--rdzv-endpoint") if self.endpoint else "localhost:0"
        return meeting_words(where, self.name(run_folder), self.is_host, self.local_addr)


def meeting_words(where: str, name: str, is_host: bool | None, local_addr: str | None) -> list[str]:
    """torchrun's options for a meeting at HOST:PORT; None leaves one out."""
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-id", name]
    if is_host is not None:
        words += ["--rdzv-conf", f"is_host={str(is_host).lower()}"]
    if local_addr is not None:
        words += ["--local-addr", local_addr]
    return words


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
    """The command line that runs a host's part of a run.

    Args:
        config: the run's file; None: the command needs none.
        overrides: `key=value`.
        processes_per_node: P.
        max_restarts: how often a failure starts the processes again.
        command: a command of `polyad`, with its options.
        nodes: hosts in all.
        min_nodes: hosts that are enough when others are lost; None: all.
        meeting: torchrun's options of the rendezvous.

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
    """Replaces this process, so that signals from a terminal reach torchrun unchanged, and its
    exit status is that of the command.
    """
    os.environ.update(variables)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, words)


def become_processes(command: Sequence[str], processes: int) -> NoReturn:
    """Replaces this process by torchrun, which runs a command of `polyad` in P processes here."""
    prepare_environment()
    share_cores(processes)
    become(torchrun(None, (), processes, 0, command=command), {})
