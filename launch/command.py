"""`polyad launch`: checks a run in this process, then becomes torchrun."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from launch.machine import prepare_environment, share_cores


def launch(
    config: Path, overrides: Sequence[str], *, processes_per_node: int, max_restarts: int = 0
) -> NoReturn:
    """Starts a run on this machine.

    Args:
        config: the run's file.
        overrides: `key=value`.
        processes_per_node: P.
        max_restarts: how often torchrun starts the processes again after a failure.

    Raises:
        ValueError: with an `exit_status` of 2: the run would not start. No process was started.
    """
    prepare_environment()
    from train.pretrain import plan_run

    plan_run(config, overrides, processes_per_node)
    share_cores(processes_per_node)
    # Replacing this process leaves nobody between the terminal and torchrun: signals reach it as
    # they are, and its exit status is ours.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, torchrun(config, overrides, processes_per_node, max_restarts))


def torchrun(
    config: Path, overrides: Sequence[str], processes_per_node: int, max_restarts: int
) -> list[str]:
    """The command line that runs a configuration in P processes of this machine."""
    return [
        *(sys.executable, "-m", "launch.torchrun", "--standalone"),
        *("--nproc-per-node", str(processes_per_node), "--max-restarts", str(max_restarts)),
        *("-m", "launch", "train", str(config), *overrides),
    ]
