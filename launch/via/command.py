"""`polyad launch`: checks a run in this process, then becomes torchrun, or has others start it.

local       this process becomes torchrun, alone
torchrun    this process becomes this host's torchrun, which meets those of the other hosts
ssh         this process starts such a torchrun on each host of a hostfile, and stays with them
slurm       a script in the run's folder starts such a torchrun on each node of a job
kubernetes  a manifest in the run's folder does so in each pod of a job
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from polyad.launch.machine import prepare_environment, share_cores
from polyad.launch.via.agent import STANDALONE, Rendezvous, torchrun
from polyad.launch.via.hostfile import chosen_hosts, read_hostfile
from polyad.launch.via.hosts import LaunchError, command_line, interface_name
from polyad.launch.via.kubernetes import (
    MOUNTED_CONFIG,
    KubernetesJob,
    apply,
    find_kubectl,
    manifest,
)
from polyad.launch.via.slurm import SlurmJob, find_sbatch, script_text, submit
from polyad.launch.via.ssh import SshOptions, SshRun, check_ssh, forwarded_variables, run_over_ssh
from polyad.launch.via.submission import write_launch_file
from polyad.train.config.run import find_config
from polyad.train.errors import one_line

if TYPE_CHECKING:
    from polyad.train.config.run import RunConfig

TORCHRUN_GRACE = 30
"""Seconds that torchrun waits for its processes to end before it kills them, unless told."""

MAX_RESTARTS = {"local": 0, "torchrun": 3, "ssh": 3, "slurm": 3, "kubernetes": 3}
"""Ways to launch, and how often each starts a run again: one killed worker can use up two."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that shall start, before it is checked."""

    config: Path | None
    """The run's file; None: of `doctor`, which looks at machines alone then."""
    overrides: Sequence[str]
    """`key=value`."""
    processes_per_node: int | None
    """P; None: as a hostfile says."""
    nodes: int | None = None
    """N hosts, with P processes each; None: one, or those of a hostfile."""
    min_nodes: int | None = None
    """Of torchrun and ssh: the run goes on with so many hosts if others are lost; None: with all.
    """
    via: str = "local"
    """One of `MAX_RESTARTS`."""
    command: Sequence[str] = ("train",)
    """The command of `polyad` that each process runs, with its options: `train` or `doctor`."""
    max_restarts: int | None = None
    """How often torchrun starts the processes again after a failure, from the run's newest
    checkpoint; None: as `MAX_RESTARTS` says."""
    dry_run: bool = False
    """Print the command, or write the script, and start nothing."""
    interface: str | None = None
    """The network interface of gloo and NCCL; None: they choose."""
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    """Of `torchrun`."""
    ssh: SshOptions | None = None
    slurm: SlurmJob = field(default_factory=SlurmJob)
    kubernetes: KubernetesJob | None = None

    @property
    def restarts(self) -> int:
        """How often it starts again after a failure."""
        if self.max_restarts is not None:
            return self.max_restarts
        return MAX_RESTARTS[self.via] if self._trains else 0

    @property
    def _file_name(self) -> str:
        """Of a script or a manifest, without its ending."""
        return "job" if self._trains else self.command[0]

    @property
    def _trains(self) -> bool:
        return self.command[0] == "train"

    def start(self) -> int:
        """Starts the run. Where this process becomes torchrun, it does not return.

        Returns:
            The exit status.

        Raises:
            ValueError: with an `exit_status` of 2: the run would not start. No process was started.
            SubmissionError: Slurm or Kubernetes did not take the job.
            HostsLostError: hosts were lost, and too few came back.
        """
        variables = interface_variables(self.interface)
        self._check()
        prepare_environment()
        if self.via == "ssh":
            return self._over_ssh(variables)
        if self.via == "slurm":
            return self._by_slurm(variables)
        if self.via == "kubernetes":
            return self._by_kubernetes(variables)
        return self._here(variables)

    def _check(self) -> None:
        if self.via not in MAX_RESTARTS:
            raise LaunchError(f"--via: {self.via!r} is not allowed; {', '.join(MAX_RESTARTS)}")
        if self.nodes is not None and self.nodes < 1:
            raise LaunchError(f"--nodes: {self.nodes} is not allowed, at least 1")
        if self.processes_per_node is None and self.via != "ssh":
            raise LaunchError("--processes-per-node: is missing; only a hostfile says it elsewhere")
        if self.config is None and self.via not in ("local", "torchrun"):
            raise LaunchError(f"CONFIG: is missing; --via {self.via} needs the file of a run")
        if self.via == "torchrun":
            _check_least(self.min_nodes, self.nodes or 1)
        if (self.nodes or 1) > 1 and self.via == "local":
            raise LaunchError(
                f"--nodes: {self.nodes} is not allowed with --via local, which starts processes of "
                f"this machine alone: 1, or take --via torchrun, ssh, slurm or kubernetes"
            )
        if (self.nodes or 1) > 1 and self.via == "torchrun" and self.rendezvous.endpoint is None:
            raise LaunchError(
                f"--rdzv-endpoint: is missing; {self.nodes} nodes need the HOST:PORT of one of "
                f"them to meet"
            )

    @property
    def _shape(self) -> tuple[int, int]:
        """Nodes, and processes of each."""
        return self.nodes or 1, self.processes_per_node or 1

    def _checked(self, nodes: int, processes: int, *, here: bool = True) -> "RunConfig":
        """The configuration: of a run that can start, or of one that a command looks at.

        Args:
            nodes: N.
            processes: of each.
            here: whether this machine sees the data and the run's folder.
        """
        from polyad.train.config.plan import plan_run
        from polyad.train.config.rules import validate
        from polyad.train.config.run import load_config

        assert self.config is not None
        with _naming_shape(nodes, processes):
            if self._trains and here:
                return plan_run(self.config, self.overrides, nodes * processes).config
            config = load_config(self.config, self.overrides)
            validate(config, nodes * processes)
            return config

    def _agent(
        self, nodes: int, processes: int, meeting: Sequence[str], config: Path | None = None
    ) -> list[str]:
        """The words of a host's agent; the configuration may have another place there."""
        return torchrun(
            *(config or self.config, self.overrides, processes, self.restarts),
            command=self.command,
            nodes=nodes,
            min_nodes=self.min_nodes if self.via == "torchrun" else None,
            meeting=meeting,
        )

    def _check_any_size(self, config: "RunConfig", nodes: int, processes: int) -> None:
        """Refuses a least number of hosts where torchrun could meet with one that does not fit."""
        if self.min_nodes is None:
            return
        fitting = _fitting_sizes(config, nodes, processes, self.min_nodes)
        for size in range(self.min_nodes, nodes):
            if size not in fitting:
                raise LaunchError(
                    f"--min-nodes: {self.min_nodes} is not allowed: with {size} hosts of "
                    f"{processes} processes the layout does not fit, and torchrun goes on with "
                    f"any number from {self.min_nodes} to {nodes}"
                )

    def _here(self, variables: dict[str, str]) -> int:
        nodes, processes = self._shape
        name = "polyad"
        if self.config is not None:
            try:
                checked = self._checked(nodes, processes)
                self._check_any_size(checked, nodes, processes)
            except ValueError as error:
                self._tell_others(error)
                raise
            name = checked.run.folder
            variables |= _patience(checked.monitor.grace_seconds)
        meeting = STANDALONE if self.via == "local" else self.rendezvous.words(name)
        words = self._agent(nodes, processes, meeting)
        _become(words, variables, processes, dry_run=self.dry_run, say=self.via != "local")
        return 0

    def _tell_others(self, error: ValueError) -> None:
        """Tells the hosts that wait for this one why it does not start, if its run is known."""
        from polyad.train.config.run import load_config

        if self.config is None or self.dry_run:
            return
        with suppress(ValueError):
            folder = load_config(self.config, self.overrides).run.folder
            self.rendezvous.tell_others(folder, one_line(error))

    def _by_slurm(self, variables: dict[str, str]) -> int:
        nodes, processes = self._shape
        sbatch = None if self.dry_run else find_sbatch()
        checked = self._checked(nodes, processes)
        folder = Path(checked.run.folder)
        self.slurm.check_grace(checked.monitor.grace_seconds)
        variables |= _patience(checked.monitor.grace_seconds)
        words = self._agent(nodes, processes, ())
        text = script_text(folder, self.slurm, words, nodes, processes, variables)
        script = write_launch_file(folder, f"{self._file_name}.sh", text)
        print(submit(script, sbatch) if sbatch else command_line(["sbatch", script]))
        return 0

    def _by_kubernetes(self, variables: dict[str, str]) -> int:
        nodes, processes = self._shape
        job = self.kubernetes or KubernetesJob()
        kubectl = None if self.dry_run else find_kubectl()
        assert self.config is not None
        # Data and the run's folder are on a volume of the cluster: the pods look at them.
        checked = self._checked(nodes, processes, here=False)
        _, *agent = self._agent(nodes, processes, (), Path(MOUNTED_CONFIG))
        text = manifest(
            *(checked.run.folder, job, find_config(self.config).read_text(encoding="utf-8"), agent),
            *(nodes, processes),
            variables=variables | _patience(checked.monitor.grace_seconds),
            restarts=self.restarts,
            grace_seconds=checked.monitor.grace_seconds,
        )
        file = write_launch_file(Path(checked.run.folder), f"{self._file_name}.yaml", text)
        if kubectl:
            print(apply(file, kubectl, job.namespace))
        else:
            print(command_line(["kubectl", "apply", "-f", file]))
        return 0

    def _over_ssh(self, variables: dict[str, str]) -> int:
        options = self.ssh or SshOptions()
        assert options.hostfile is not None
        assert self.config is not None
        named = read_hostfile(options.hostfile)
        hosts, processes = chosen_hosts(
            named, options.hostfile, self.nodes, self.processes_per_node
        )
        if not self.dry_run:
            check_ssh()
        checked = self._checked(len(hosts), processes)
        run = SshRun(
            hosts=hosts,
            processes_per_node=processes,
            workplace=os.getcwd(),
            config=self.config,
            options=options,
            variables=forwarded_variables(os.environ)
            | variables
            | _patience(checked.monitor.grace_seconds),
            agent=lambda nodes, meeting: self._agent(nodes, processes, meeting)[1:],
            sizes=_fitting_sizes(checked, len(hosts), processes, self.min_nodes),
            restarts=self.restarts,
            needs_interface=self.interface is None,
        )
        if self.dry_run:
            for host in hosts:
                print(command_line(run.command(host)))
            return 0
        return run_over_ssh(run)


def _check_least(min_nodes: int | None, nodes: int) -> int:
    """The least number of hosts of a run.

    Raises:
        LaunchError: it is more than all.
    """
    least = nodes if min_nodes is None else min_nodes
    if not 1 <= least <= nodes:
        raise LaunchError(f"--min-nodes: {least} is not allowed; 1 to the number of hosts, {nodes}")
    return least


def _fitting_sizes(
    config: "RunConfig", nodes: int, processes: int, min_nodes: int | None
) -> list[int]:
    """Numbers of hosts that the layout fits, the largest first."""
    from polyad.parallel.dims import LayoutError
    from polyad.train.config.rules import validate

    least = _check_least(min_nodes, nodes)
    sizes = []
    for size in range(nodes, least - 1, -1):
        try:
            validate(config, size * processes)
            sizes.append(size)
        except LayoutError as error:
            if size == least:
                raise LaunchError(
                    f"--min-nodes: {least} x {processes} = {least * processes} processes do not "
                    f"fit: {error}"
                ) from None
    return sizes


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


def _patience(grace_seconds: float) -> dict[str, str]:
    """Variables that make torchrun wait as long as the processes may take to save their step."""
    wanted = math.ceil(grace_seconds) + 5
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{wanted}"} if wanted > TORCHRUN_GRACE else {}


@contextmanager
def _naming_shape(nodes: int, processes: int) -> Iterator[None]:
    """A layout that does not fit several nodes is said to be theirs."""
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
