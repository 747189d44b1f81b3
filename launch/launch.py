"""`polyad launch`: checks a run in this process, then becomes torchrun, or submits it to Slurm.

local  this process becomes torchrun, for this host alone
slurm  a script in the run's folder starts such a torchrun on each node of a job
"""

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyad.launch.command import NonNegative, Overrides, Positive
from polyad.launch.processes import share_cores
from polyad.launch.slurm import (
    LaunchError,
    check_job,
    find_sbatch,
    script_text,
    submit,
    write_script,
)
from polyad.launch.torchrun import become, torchrun

if TYPE_CHECKING:
    from polyad.train.config.run import RunConfig

TORCHRUN_GRACE = 30
"""Seconds that torchrun by default waits for its processes to end before it kills them."""
MAX_RESTARTS = {"local": 0, "slurm": 3}
"""Default number of restarts by way of starting: one killed worker can use up two."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A command that runs in processes on one or more hosts.

    Args:
        processes_per_node (P): processes per host, one for each GPU.
        nodes: number of hosts; default 1.
        via: how processes are started; default local: on this machine; with slurm the cluster's
            defaults apply to whatever is not given.
        max_restarts (R): how often to restart from the newest checkpoint after a failure; default
            0 with --via local, 3 with slurm.
        dry_run: print the command or write the job script without starting anything.
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
    via: Literal["local", "slurm"] = "local"
    max_restarts: NonNegative | None = None
    dry_run: bool = False
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
        processes = self._check_shape()
        check_job(self.sbatch, self.setup)
        by_slurm, variables = self.via == "slurm", dict[str, str]()
        sbatch = find_sbatch() if by_slurm and not self.dry_run else None
        words, folder = [*self.command], Path()
        if self.config is not None:
            config = self._checked(self.config, processes)
            folder, variables = Path(config.run.folder), _patience(config)
            # A name that starts with a dash would be read as an option.
            words.append(f"./{self.config}" if str(self.config)[0] == "-" else str(self.config))
        restarts = self.max_restarts
        if restarts is None:
            restarts = MAX_RESTARTS[self.via] if self.command[0] == "train" else 0
        agent = torchrun([*words, *self.overrides], processes, restarts, nodes=self.nodes)
        if by_slurm:
            return self._submit(sbatch, folder, agent, processes, variables)
        share_cores(processes)
        if self.dry_run:
            shown = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], **variables}
            print(shlex.join(["env", *(f"{key}={value}" for key, value in shown.items()), *agent]))
            return 0
        become(agent, variables)

    def _check_shape(self) -> int:
        """Returns the number of processes of each host."""
        if self.processes_per_node is None:
            raise LaunchError("--processes-per-node: is missing")
        if self.via == "slurm":
            if self.config is None:
                raise LaunchError("CONFIG: is missing; --via slurm needs the file of a run")
        elif self.nodes > 1:
            raise LaunchError(
                f"--nodes: {self.nodes} is not allowed with --via local, which starts processes on "
                "this machine only; use --via slurm, or torchrun on every host"
            )
        elif given := self.sbatch or self.setup:
            option = "--sbatch" if self.sbatch else "--setup"
            raise LaunchError(f"{option}: {given} is not allowed with --via local, only with slurm")
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
        if self.command[0] == "train" and not self.dry_run:
            print(f"exports to: {exports_to(config)}", file=sys.stderr)
        return config

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
        print(submit(script, sbatch) if sbatch else shlex.join(["sbatch", script]))
        return 0


def _patience(config: "RunConfig") -> dict[str, str]:
    """Variables that make torchrun wait for as long as processes may take to save their step.

    It does not wait longer, since all others wait for the end of a frozen process.
    """
    wanted = math.ceil(config.monitor.grace_seconds) + 5
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{wanted}"} if wanted != TORCHRUN_GRACE else {}
