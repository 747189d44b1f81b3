"""`polyad launch`: checks a run in this process, then becomes torchrun, or hands it to Slurm.

local      this process becomes torchrun, alone
torchrun   this process becomes this host's torchrun, which meets those of the other hosts
slurm      a script in the run's folder starts such a torchrun on each node of a job
"""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.machine import prepare_environment, share_cores
from launch.via.agent import STANDALONE, Rendezvous, torchrun
from launch.via.hosts import LaunchError, command_line, interface_name
from launch.via.slurm import SlurmJob, find_sbatch, script_text, submit, write_script

if TYPE_CHECKING:
    from train.config.run import RunConfig

TORCHRUN_GRACE = 30
"""Seconds that torchrun waits for its processes to end before it kills them, unless told."""

MAX_RESTARTS = {"local": 0, "torchrun": 3, "slurm": 3}
"""Ways to launch, and how often each starts a run again: one killed worker can use up two."""


def launch(
    config: Path,
    overrides: Sequence[str],
    *,
    processes_per_node: int,
    nodes: int = 1,
    via: str = "local",
    max_restarts: int | None = None,
    dry_run: bool = False,
    interface: str | None = None,
    rendezvous: Rendezvous | None = None,
    job: SlurmJob | None = None,
) -> None:
    """Starts a run. Where this process becomes torchrun, it does not return.

    Args:
        config: the run's file.
        overrides: `key=value`.
        processes_per_node: P.
        nodes: N hosts, with P processes each.
        via: one of `MAX_RESTARTS`.
        max_restarts: how often torchrun starts the processes again after a failure, from the
            run's newest checkpoint; None: as `MAX_RESTARTS` says.
        dry_run: print the command, or write the script, and start nothing.
        interface: the network interface of gloo and NCCL; None: they choose.
        rendezvous: of `torchrun`.
        job: what is asked of `slurm`.

    Raises:
        ValueError: with an `exit_status` of 2: the run would not start. No process was started.
        SubmissionError: Slurm did not take the job.
    """
    rendezvous, job = rendezvous or Rendezvous(), job or SlurmJob()
    variables = interface_variables(interface)
    _check_nodes(nodes, via, rendezvous)
    sbatch = find_sbatch() if via == "slurm" and not dry_run else None
    restarts = MAX_RESTARTS[via] if max_restarts is None else max_restarts
    prepare_environment()
    checked = _check_run(config, overrides, nodes, processes_per_node)
    folder = Path(checked.run.folder)
    variables |= _patience(checked.monitor.grace_seconds)
    if via == "slurm":
        words = torchrun(config, overrides, processes_per_node, restarts, nodes=nodes, meeting=())
        text = script_text(folder, job, words, nodes, processes_per_node, variables)
        script = write_script(folder, text)
        print(submit(script, sbatch) if sbatch else command_line(["sbatch", script]))
        return
    meeting = STANDALONE if via == "local" else rendezvous.words(str(folder))
    words = torchrun(config, overrides, processes_per_node, restarts, nodes=nodes, meeting=meeting)
    _become(words, variables, processes_per_node, dry_run=dry_run, say=via != "local")


def interface_variables(interface: str | None) -> dict[str, str]:
    """Environment variables that bind gloo and NCCL to a network interface.

    Raises:
        LaunchError: no interface can be called so.
    """
    if interface is None:
        return {}
    interface_name(interface, "--interface")
    # NCCL takes a bare name as a prefix: eth1 would also match eth10.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def _check_nodes(nodes: int, via: str, rendezvous: Rendezvous) -> None:
    if via not in MAX_RESTARTS:
        raise LaunchError(f"--via: {via!r} is not allowed; {', '.join(MAX_RESTARTS)}")
    if nodes < 1:
        raise LaunchError(f"--nodes: {nodes} is not allowed, at least 1")
    if nodes > 1 and via == "local":
        raise LaunchError(
            f"--nodes: {nodes} is not allowed with --via local, which starts processes of this "
            f"machine alone: 1, or take --via torchrun or --via slurm"
        )
    if nodes > 1 and via == "torchrun" and rendezvous.endpoint is None:
        raise LaunchError(
            f"--rdzv-endpoint: is missing; {nodes} nodes need the HOST:PORT of one of them to meet"
        )


def _patience(grace_seconds: float) -> dict[str, str]:
    """Variables that make torchrun wait as long as the processes may take to save their step."""
    wanted = math.ceil(grace_seconds) + 5
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{wanted}"} if wanted > TORCHRUN_GRACE else {}


def _check_run(config: Path, overrides: Sequence[str], nodes: int, processes: int) -> "RunConfig":
    """Checks the run for all processes of all nodes; gives its configuration."""
    from parallel.dims import LayoutError
    from train.config.plan import plan_run

    try:
        plan = plan_run(config, overrides, nodes * processes)
    except LayoutError as error:
        if nodes == 1:
            raise
        raise LaunchError(
            f"--nodes {nodes} x --processes-per-node {processes} = {nodes * processes} processes "
            f"do not fit: {error}"
        ) from None
    return plan.config


def _become(
    words: list[str], variables: dict[str, str], processes: int, *, dry_run: bool, say: bool
) -> None:
    """Replaces this process, or prints what it would become."""
    share_cores(processes)
    os.environ.update(variables)
    line = command_line(words, {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], **variables})
    if dry_run:
        print(line)
        return
    if say:
        print(line, file=sys.stderr)
    # Replaces this process, so that signals from the terminal reach torchrun unchanged, and its
    # exit status is that of the command.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, words)
