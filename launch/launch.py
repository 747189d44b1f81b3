"""`polyad launch`: checks a run in this process, then becomes torchrun, or submits it to Slurm.

local     this process becomes torchrun, for this host alone
torchrun  this process becomes this host's torchrun, which connects to those of other hosts
slurm     a script in the run's folder starts such a torchrun on each node of a job
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyad.launch.agent import STANDALONE, Rendezvous, become, torchrun
from polyad.launch.command import NonNegative, Positive
from polyad.launch.hosts import LaunchError, command_line, interface_name
from polyad.launch.machine import prepare_environment, share_cores
from polyad.launch.slurm import SlurmJob, find_sbatch, script_text, submit, write_script

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
class LaunchOptions:
    """How to start processes; options of another way of starting are not allowed.

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

    processes_per_node: Positive | None = None
    nodes: Positive | None = None
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


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run to start, not checked yet."""

    config: Path | None
    """The run's file; None: `doctor` examines only machines."""
    overrides: Sequence[str]
    """`key=value`."""
    how: LaunchOptions
    command: Sequence[str] = ("train",)
    """The `polyad` command that each process runs, with its options: `train` or `doctor`."""

    def start(self) -> int:
        """Starts the run; does not return if this process becomes torchrun.

        Returns:
            The exit status.

        Raises:
            ValueError: with an `exit_status` of 2: the run would not start. No process was started.
            SubmissionError: Slurm rejected the job.
        """
        how = self.how
        for name, via in ONLY_FOR.items():
            value = getattr(how, name)
            if value not in (None, [], ()) and via != how.via:
                shown = value if isinstance(value, int) else repr(str(value))
                raise LaunchError(
                    f"--{name.replace('_', '-')}: {shown} is not allowed with --via {how.via}; it "
                    f"is an option for --via {via}"
                )
        rendezvous, job = _rendezvous(how), SlurmJob(sbatch=how.sbatch, setup=how.setup)
        variables = interface_variables(how.interface)
        self._check()
        prepare_environment()
        if how.via == "slurm":
            return self._by_slurm(job, variables)
        return self._here(rendezvous, variables)

    def _check(self) -> None:
        how = self.how
        nodes = how.nodes or 1
        if how.processes_per_node is None:
            raise LaunchError("--processes-per-node: is missing")
        if self.config is None and how.via not in ("local", "torchrun"):
            raise LaunchError(f"CONFIG: is missing; --via {how.via} needs the file of a run")
        if how.min_nodes is not None and not 1 <= how.min_nodes <= nodes:
            raise LaunchError(
                f"--min-nodes: {how.min_nodes} is not allowed; 1 to the number of hosts, {nodes}"
            )
        if nodes > 1 and how.via == "local":
            raise LaunchError(
                f"--nodes: {nodes} is not allowed with --via local, which starts processes on this "
                "machine only; use 1, or --via torchrun or slurm"
            )
        if nodes > 1 and how.via == "torchrun" and how.rdzv_endpoint is None:
            raise LaunchError(
                f"--rdzv-endpoint: is missing; {nodes} nodes need the HOST:PORT of one of them as "
                "the rendezvous address"
            )

    @property
    def _trains(self) -> bool:
        return self.command[0] == "train"

    @property
    def _restarts(self) -> int:
        if self.how.max_restarts is not None:
            return self.how.max_restarts
        return MAX_RESTARTS[self.how.via] if self._trains else 0

    @property
    def _shape(self) -> tuple[int, int]:
        """The number of nodes, and of processes per node."""
        return self.how.nodes or 1, self.how.processes_per_node or 1

    def _checked(self, nodes: int, processes: int) -> "RunConfig":
        """Returns the checked configuration of a run that can start, or that a command examines.

        Args:
            nodes: number of nodes.
            processes: number of processes per node.
        """
        from polyad.train.config.rules import validate
        from polyad.train.config.run import load_config
        from polyad.train.start import plan_run

        assert self.config is not None
        with _naming_shape(nodes, processes):
            if self._trains:
                return plan_run(self.config, self.overrides, nodes * processes).config
            config = load_config(self.config, self.overrides)
            validate(config, nodes * processes)
            return config

    def _agent(self, nodes: int, processes: int, meeting: Sequence[str]) -> list[str]:
        """The command line of a host's agent."""
        return torchrun(
            *(self.config, self.overrides, processes, self._restarts),
            command=self.command,
            nodes=nodes,
            min_nodes=self.how.min_nodes,
            meeting=meeting,
        )

    def _here(self, rendezvous: Rendezvous, variables: dict[str, str]) -> int:
        nodes, processes = self._shape
        name = "polyad"
        if self.config is not None:
            checked = self._checked(nodes, processes)
            self._check_any_size(checked, nodes, processes)
            name = checked.run.folder
            variables |= _patience(checked)
        is_local = self.how.via == "local"
        words = self._agent(nodes, processes, STANDALONE if is_local else rendezvous.words(name))
        share_cores(processes)
        line = command_line(words, {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], **variables})
        if self.how.dry_run:
            print(line)
            return 0
        if not is_local:
            print(line, file=sys.stderr)
        become(words, variables)

    def _check_any_size(self, config: "RunConfig", nodes: int, processes: int) -> None:
        """Rejects a minimum number of hosts if torchrun could start with a number that does not
        fit."""
        from polyad.parallel.dims import LayoutError
        from polyad.train.config.rules import validate

        least = self.how.min_nodes
        for size in range(least or nodes, nodes):
            try:
                validate(config, size * processes)
            except LayoutError as error:
                raise LaunchError(
                    f"--min-nodes: {least} is not allowed: with {size} hosts of {processes} "
                    f"processes the layout does not fit, and torchrun goes on with any number from "
                    f"{least} to {nodes}: {error}"
                ) from None

    def _by_slurm(self, job: SlurmJob, variables: dict[str, str]) -> int:
        from polyad.train.start import LAUNCH_FOLDER  # not at the top: it imports torch

        nodes, processes = self._shape
        sbatch = None if self.how.dry_run else find_sbatch()
        checked = self._checked(nodes, processes)
        folder = Path(checked.run.folder).absolute() / LAUNCH_FOLDER
        words = self._agent(nodes, processes, ())
        text = script_text(folder, job, words, nodes, processes, variables | _patience(checked))
        name = "job.sh" if self._trains else f"{self.command[0]}.sh"
        script = write_script(folder, name, text)
        print(submit(script, sbatch) if sbatch else command_line(["sbatch", script]))
        return 0


def _rendezvous(how: LaunchOptions) -> Rendezvous:
    return Rendezvous(
        endpoint=how.rdzv_endpoint,
        id=how.rdzv_id,
        is_host=None if how.rdzv_is_host is None else how.rdzv_is_host == "true",
        local_addr=how.local_addr,
    )


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


@contextmanager
def _naming_shape(nodes: int, processes: int) -> Iterator[None]:
    """A context that adds the number of nodes to errors about a layout that does not fit."""
    from polyad.parallel.dims import LayoutError

    try:
        yield
    except LayoutError as error:
        if nodes == 1:
            raise
        raise LaunchError(
            f"--nodes {nodes} x --processes-per-node {processes} = {nodes * processes} processes "
            f"do not fit: {error}"
        ) from None
