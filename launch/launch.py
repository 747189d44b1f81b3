"""`polyad launch`: checks a run in this process, then becomes torchrun, or submits it to Slurm.

local     this process becomes torchrun, for this host alone
torchrun  this process becomes this host's torchrun, which connects to those of other hosts
slurm     a script in the run's folder starts such a torchrun on each node of a job
"""

import hashlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyad.launch.agent import (
    STANDALONE,
    LaunchError,
    become,
    command_line,
    endpoint,
    host_name,
    interface_name,
    plain_name,
    torchrun,
)
from polyad.launch.command import NonNegative, Overrides, Positive
from polyad.launch.processes import share_cores
from polyad.launch.slurm import check_job, find_sbatch, script_text, submit, write_script

if TYPE_CHECKING:
    from polyad.train.config.run import RunConfig

TORCHRUN_GRACE = 30
"""Seconds that torchrun by default waits for its processes to end before it kills them."""
MAX_RESTARTS = {"local": 0, "torchrun": 3, "slurm": 3}
"""Default number of restarts by way of starting: one killed worker can use up two."""
ONLY_FOR = {
    **dict.fromkeys(
        ("rdzv_endpoint", "rdzv_id", "rdzv_is_host", "local_addr", "min_nodes"), "torchrun"
    ),
    **dict.fromkeys(("sbatch", "setup"), "slurm"),
}
"""Options of one way of starting."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A command that runs in processes on one or more hosts.

    Options of another way of starting processes are not allowed.

    Args:
        processes_per_node (P): processes per host, one for each GPU.
        nodes: number of hosts; default 1.
        via: how processes are started; default local: on this machine; with torchrun run the same
            command on every host; with slurm the cluster's defaults apply to whatever is not given.
        max_restarts (R): how often to restart from the newest checkpoint after a failure; default
            0 with --via local, otherwise 3.
        interface (NAME): network interface for gloo and NCCL, for example eth0.
        dry_run: print the command or write the job script without starting anything.
        min_nodes (M): with --via torchrun: continue with as few as M hosts when others are lost;
            default: all are needed.
        rdzv_endpoint (HOST[:PORT]): with --via torchrun: rendezvous address: one of the hosts.
        rdzv_id (ID): with --via torchrun: identifier of the run at the rendezvous; default: derived
            from run.folder.
        rdzv_is_host: with --via torchrun: whether this host is the rendezvous endpoint; default:
            detected from its name and addresses.
        local_addr (HOST): with --via torchrun: address at which the other hosts reach this one;
            default: its host name.
        sbatch (KEY=VALUE): with --via slurm: an option of sbatch without dashes, for example
            time=24:00:00 or gpus-per-node=8; may be repeated.
        setup (FILE): with --via slurm: a file of bash that the job reads before it starts
            processes, such as module load.
    """

    config: Path | None = field(kw_only=False)
    """The run's file; None: `doctor` examines only machines."""
    overrides: Overrides = field(kw_only=False)
    processes_per_node: Positive | None = None
    nodes: Positive = 1
    via: Literal["local", "torchrun", "slurm"] = "local"
    max_restarts: NonNegative | None = None
    interface: str | None = None
    dry_run: bool = False
    min_nodes: Positive | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_is_host: Literal["true", "false"] | None = None
    local_addr: str | None = None
    sbatch: Sequence[str] = ()
    setup: Path | None = None

    @property
    def command(self) -> Sequence[str]:
        """The `polyad` command that each process runs, with its options: `train` or `doctor`."""
        return ("train",)

    def start(self) -> int:
        """Starts the processes; does not return if this process becomes torchrun.

        Returns:
            The exit status.

        Raises:
            ValueError: with an `exit_status` of 2: the run would not start. No process was started.
            SubmissionError: Slurm rejected the job.
        """
        self._check_options()
        variables = interface_variables(self.interface)
        processes = self._check_shape()
        by_slurm = self.via == "slurm"
        sbatch = find_sbatch() if by_slurm and not self.dry_run else None
        folder = "polyad"
        if self.config is not None:
            config = self._checked(self.config, processes)
            folder = config.run.folder
            variables |= _patience(config)
        trains = self.command[0] == "train"
        restarts = MAX_RESTARTS[self.via] if trains else 0
        agent = torchrun(
            self.config,
            self.overrides,
            processes,
            restarts if self.max_restarts is None else self.max_restarts,
            command=self.command,
            nodes=self.nodes,
            min_nodes=self.min_nodes,
            meeting=self.rendezvous(folder),
        )
        if by_slurm:
            return self._submit(sbatch, Path(folder), agent, processes, variables)
        share_cores(processes)
        line = command_line(agent, {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], **variables})
        if self.dry_run:
            print(line)
            return 0
        if self.via == "torchrun":
            print(line, file=sys.stderr)
        become(agent, variables)

    def _check_options(self) -> None:
        for name, via in ONLY_FOR.items():
            value = getattr(self, name)
            if value not in (None, [], ()) and via != self.via:
                shown = value if isinstance(value, int) else repr(str(value))
                raise LaunchError(
                    f"--{name.replace('_', '-')}: {shown} is not allowed with --via {self.via}; it "
                    f"is an option for --via {via}"
                )
        if self.rdzv_endpoint is not None:
            endpoint(self.rdzv_endpoint, "--rdzv-endpoint")
        if self.rdzv_id is not None:
            plain_name(self.rdzv_id, "--rdzv-id")
        if self.local_addr is not None:
            host_name(self.local_addr, "--local-addr")
        check_job(self.sbatch, self.setup)

    def _check_shape(self) -> int:
        """Returns the number of processes of each host."""
        nodes = self.nodes
        if self.processes_per_node is None:
            raise LaunchError("--processes-per-node: is missing")
        if self.config is None and self.via not in ("local", "torchrun"):
            raise LaunchError(f"CONFIG: is missing; --via {self.via} needs the file of a run")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= nodes:
            raise LaunchError(
                f"--min-nodes: {self.min_nodes} is not allowed; 1 to the number of hosts, {nodes}"
            )
        if nodes > 1 and self.via == "local":
            raise LaunchError(
                f"--nodes: {nodes} is not allowed with --via local, which starts processes on this "
                "machine only; use 1, or --via torchrun or slurm"
            )
        if nodes > 1 and self.via == "torchrun" and self.rdzv_endpoint is None:
            raise LaunchError(
                f"--rdzv-endpoint: is missing; {nodes} nodes need the HOST:PORT of one of them as "
                "the rendezvous address"
            )
        return self.processes_per_node

    def _checked(self, path: Path, processes: int) -> "RunConfig":
        """Returns the checked configuration of a run that can start, or that a command examines.

        Args:
            path: its file.
            processes: number of processes of each host.
        """
        from polyad.parallel.config import LayoutError
        from polyad.train.config.rules import validate
        from polyad.train.config.run import load_config
        from polyad.train.describe import exports_to
        from polyad.train.start import find_start, open_plan

        nodes = self.nodes
        try:
            if self.command[0] == "train":
                config = find_start(open_plan(path, self.overrides, nodes * processes)).config
            else:
                config = load_config(path, self.overrides)
                validate(config, nodes * processes)
        except LayoutError as error:
            if nodes == 1:
                raise
            raise LaunchError(
                f"--nodes {nodes} x --processes-per-node {processes} = {nodes * processes} "
                f"processes do not fit: {error}"
            ) from None
        least = self.min_nodes
        for size in range(least or nodes, nodes):
            try:
                validate(config, size * processes)
            except LayoutError as error:
                raise LaunchError(
                    f"--min-nodes: {least} is not allowed: with {size} hosts of {processes} "
                    f"processes the layout does not fit, and torchrun goes on with any number from "
                    f"{least} to {nodes}: {error}"
                ) from None
        if self.command[0] == "train" and not self.dry_run:
            print(f"exports to: {exports_to(config)}", file=sys.stderr)
        return config

    def rendezvous(self, run_folder: str) -> Sequence[str]:
        """torchrun's options for the rendezvous of all hosts' agents.

        Unlike torchrun's static rendezvous, c10d can restart a run after a failure.

        Args:
            run_folder: as written in the configuration, so that all hosts derive the same id.
        """
        if self.via == "local":
            return STANDALONE
        if self.via == "slurm":  # only the job knows its hosts
            return ()
        where = endpoint(self.rdzv_endpoint or "localhost:0", "--rdzv-endpoint")
        name = self.rdzv_id or f"polyad-{hashlib.sha256(run_folder.encode()).hexdigest()[:12]}"
        words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-id", name]
        if self.rdzv_is_host is not None:
            words += ["--rdzv-conf", f"is_host={self.rdzv_is_host}"]
        if self.local_addr is not None:
            words += ["--local-addr", self.local_addr]
        return words

    def _submit(
        self,
        sbatch: str | None,
        run_folder: Path,
        agent: Sequence[str],
        processes: int,
        variables: Mapping[str, str],
    ) -> int:
        """Writes the job's script into the run's folder, and submits it unless `sbatch` is None."""
        from polyad.train.start import LAUNCH_FOLDER  # not at the top: it imports torch

        folder = run_folder.absolute() / LAUNCH_FOLDER
        text = script_text(
            *(folder, agent, self.nodes, processes, variables), sbatch=self.sbatch, setup=self.setup
        )
        name = "job.sh" if self.command[0] == "train" else f"{self.command[0]}.sh"
        script = write_script(folder, name, text)
        print(submit(script, sbatch) if sbatch else command_line(["sbatch", script]))
        return 0


def interface_variables(interface: str | None) -> dict[str, str]:
    """Environment variables that bind gloo and NCCL to a network interface.

    Raises:
        LaunchError: the name is not valid for an interface.
    """
    if interface is None:
        return {}
    interface_name(interface, "--interface")
    # NCCL takes a bare name as a prefix: eth1 would also match eth10.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def _patience(config: "RunConfig") -> dict[str, str]:
    """Variables that make torchrun wait for as long as processes may take to save their step.

    It does not wait longer, since all others wait for the end of a frozen process.
    """
    wanted = math.ceil(config.monitor.grace_seconds) + 5
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{wanted}"} if wanted != TORCHRUN_GRACE else {}
