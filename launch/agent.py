"""One host's torchrun agent: its command line, and how this process becomes it."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from polyad.launch import torchrun as launcher
from polyad.launch.machine import prepare_environment, share_cores
from polyad.launch.processes import block_signals

STANDALONE = (launcher.STANDALONE,)


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
