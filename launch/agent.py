"""One host's torchrun agent: its command line, and its rendezvous with other hosts."""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from polyad.launch import torchrun as launcher
from polyad.launch.hosts import endpoint, host_name, plain_name
from polyad.launch.machine import prepare_environment, share_cores
from polyad.launch.processes import block_signals

STANDALONE = (launcher.STANDALONE,)


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The rendezvous of all hosts' agents (torchrun's c10d).

    Unlike torchrun's static rendezvous, it can restart a run after a failure.

    Raises:
        LaunchError: a value is not a host, port or name.
    """

    endpoint: str | None = None
    """HOST or HOST:PORT, equal on all hosts; None for a single host."""
    id: str | None = None
    """Id that distinguishes runs at one endpoint; None: derived from the run's folder."""
    is_host: bool | None = None
    """Whether the endpoint is on this host; None: torchrun compares names and addresses."""
    local_addr: str | None = None
    """The address at which other hosts reach this one; None: its full name."""

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            endpoint(self.endpoint, "--rdzv-endpoint")
        if self.id is not None:
            plain_name(self.id, "--rdzv-id")
        if self.local_addr is not None:
            host_name(self.local_addr, "--local-addr")

    def name(self, run_folder: str) -> str:
        """The id of the rendezvous.

        Args:
            run_folder: as written in the configuration, so that all hosts derive the same id.
        """
        return self.id or f"polyad-{hashlib.sha256(run_folder.encode()).hexdigest()[:12]}"

    def words(self, run_folder: str) -> list[str]:
        """torchrun's options; see `name`."""
        where = endpoint(self.endpoint, "--rdzv-endpoint") if self.endpoint else "localhost:0"
        words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", where]
        words += ["--rdzv-id", self.name(run_folder)]
        if self.is_host is not None:
            words += ["--rdzv-conf", f"is_host={str(self.is_host).lower()}"]
        if self.local_addr is not None:
            words += ["--local-addr", self.local_addr]
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


def become_processes(command: Sequence[str], processes: int) -> NoReturn:
    """Replaces this process by torchrun, which runs a `polyad` command in P local processes."""
    prepare_environment()
    share_cores(processes)
    become(torchrun(None, (), processes, 0, command=command), {})
