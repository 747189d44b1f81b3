"""`polyad launch`: checks a run in this process, then becomes torchrun, or submits it elsewhere.

local       this process becomes torchrun, for this host alone
torchrun    this process becomes this host's torchrun, which connects to those of other hosts
ssh         this process starts such a torchrun on each host of a hostfile, and supervises them
slurm       a script in the run's folder starts such a torchrun on each node of a job
kubernetes  a manifest in the run's folder does so in each pod of a job
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from polyad.launch.machine import prepare_environment, share_cores
from polyad.launch.via.agent import STANDALONE, Rendezvous, become, torchrun
from polyad.launch.via.hosts import (
    LaunchError,
    chosen_hosts,
    command_line,
    interface_name,
    read_hostfile,
)
from polyad.launch.via.kubernetes import (
    MOUNTED_CONFIG,
    KubernetesJob,
    apply,
    find_kubectl,
    manifest,
)
from polyad.launch.via.options import ONLY_FOR, LaunchOptions, asked_of, check_ways
from polyad.launch.via.slurm import SlurmJob, find_sbatch, script_text, submit
from polyad.launch.via.ssh import run_over_ssh
from polyad.launch.via.ssh_hosts import SshOptions, SshRun, check_ssh, forwarded_variables
from polyad.launch.via.submission import write_launch_file
from polyad.train.config.run import find_config
from polyad.train.errors import one_line

if TYPE_CHECKING:
    from polyad.train.config.run import RunConfig

TORCHRUN_GRACE = 30
"""Seconds that torchrun by default waits for its processes to end before it kills them."""

MAX_RESTARTS = {"local": 0, "torchrun": 3, "ssh": 3, "slurm": 3, "kubernetes": 3}
"""Default number of restarts per backend: one killed worker can use up two."""


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
            SubmissionError: Slurm or Kubernetes rejected the job.
            HostsLostError: hosts were lost, and too few came back.
        """
        how = self.how
        check_ways(vars(how), how.via, ONLY_FOR)
        match how.via:
            case "ssh":
                start = partial(self._over_ssh, asked_of(SshOptions, how))
            case "slurm":
                start = partial(self._by_slurm, asked_of(SlurmJob, how))
            case "kubernetes":
                start = partial(self._by_kubernetes, asked_of(KubernetesJob, how))
            case _:
                start = partial(self._here, _rendezvous(how))
        variables = interface_variables(how.interface)
        self._check()
        prepare_environment()
        return start(variables)

    def _check(self) -> None:
        how = self.how
        nodes = how.nodes or 1
        if how.via not in MAX_RESTARTS:
            raise LaunchError(f"--via: {how.via!r} is not allowed; {', '.join(MAX_RESTARTS)}")
        if how.nodes is not None and how.nodes < 1:
            raise LaunchError(f"--nodes: {how.nodes} is not allowed, at least 1")
        if how.processes_per_node is None and how.via != "ssh":
            raise LaunchError(
                "--processes-per-node: is missing; only a hostfile can give it instead"
            )
        if self.config is None and how.via not in ("local", "torchrun"):
            raise LaunchError(f"CONFIG: is missing; --via {how.via} needs the file of a run")
        if how.via == "torchrun":
            _check_least(how.min_nodes, nodes)
        if nodes > 1 and how.via == "local":
            raise LaunchError(
                f"--nodes: {nodes} is not allowed with --via local, which starts processes on this "
                "machine only; use 1, or --via torchrun, ssh, slurm or kubernetes"
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

    @property
    def _file_name(self) -> str:
        """The name of a script or a manifest, without its suffix."""
        return "job" if self._trains else self.command[0]

    def _checked(self, nodes: int, processes: int, *, here: bool = True) -> "RunConfig":
        """Returns the checked configuration of a run that can start, or that a command examines.

        Args:
            nodes: number of nodes.
            processes: number of processes per node.
            here: whether this machine has access to the data and the run's folder.
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
        """The command line of a host's agent; the configuration may have another path there."""
        return torchrun(
            *(config or self.config, self.overrides, processes, self._restarts),
            command=self.command,
            nodes=nodes,
            min_nodes=self.how.min_nodes if self.how.via == "torchrun" else None,
            meeting=meeting,
        )

    def _here(self, rendezvous: Rendezvous, variables: dict[str, str]) -> int:
        nodes, processes = self._shape
        name = "polyad"
        if self.config is not None:
            try:
                checked = self._checked(nodes, processes)
                self._check_any_size(checked, nodes, processes)
            except ValueError as error:
                self._tell_others(rendezvous, error)
                raise
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
        least = self.how.min_nodes
        if least is None:
            return
        fitting = _fitting_sizes(config, nodes, processes, least)
        for size in range(least, nodes):
            if size not in fitting:
                raise LaunchError(
                    f"--min-nodes: {least} is not allowed: with {size} hosts of {processes} "
                    f"processes the layout does not fit, and torchrun goes on with any number from "
                    f"{least} to {nodes}"
                )

    def _tell_others(self, rendezvous: Rendezvous, error: ValueError) -> None:
        """Notifies the hosts that wait for this one why it does not start, if its run is known."""
        from polyad.train.config.run import load_config

        if self.config is None or self.how.dry_run:
            return
        with suppress(ValueError):
            folder = load_config(self.config, self.overrides).run.folder
            rendezvous.tell_others(folder, one_line(error))

    def _by_slurm(self, job: SlurmJob, variables: dict[str, str]) -> int:
        nodes, processes = self._shape
        sbatch = None if self.how.dry_run else find_sbatch()
        checked = self._checked(nodes, processes)
        folder = Path(checked.run.folder)
        job.check_grace(checked.monitor.grace_seconds)
        words = self._agent(nodes, processes, ())
        text = script_text(folder, job, words, nodes, processes, variables | _patience(checked))
        script = write_launch_file(folder, f"{self._file_name}.sh", text)
        print(submit(script, sbatch) if sbatch else command_line(["sbatch", script]))
        return 0

    def _by_kubernetes(self, job: KubernetesJob, variables: dict[str, str]) -> int:
        nodes, processes = self._shape
        kubectl = None if self.how.dry_run else find_kubectl()
        assert self.config is not None
        # Data and the run's folder are on a volume of the cluster, where the pods check them.
        checked = self._checked(nodes, processes, here=False)
        _, *agent = self._agent(nodes, processes, (), Path(MOUNTED_CONFIG))
        text = manifest(
            *(checked.run.folder, job, find_config(self.config).read_text(encoding="utf-8"), agent),
            *(nodes, processes),
            variables=variables | _patience(checked),
            restarts=self._restarts,
            grace_seconds=checked.monitor.grace_seconds,
        )
        file = write_launch_file(Path(checked.run.folder), f"{self._file_name}.yaml", text)
        if kubectl:
            print(apply(file, kubectl, job.namespace))
        else:
            print(command_line(["kubectl", "apply", "-f", file]))
        return 0

    def _over_ssh(self, options: SshOptions, variables: dict[str, str]) -> int:
        assert options.hostfile is not None
        assert self.config is not None
        named, spares = read_hostfile(options.hostfile), self.how.spare_nodes or 0
        if spares and len(named) < (self.how.nodes or 1) + spares:
            raise LaunchError(
                f"--spare-nodes: {spares} is not allowed; {options.hostfile} names {len(named)} "
                f"hosts, and the run takes {self.how.nodes or 'at least 1'} of them"
            )
        hosts, processes = chosen_hosts(
            named,
            options.hostfile,
            None if self.how.nodes is None else self.how.nodes + spares,
            self.how.processes_per_node,
        )
        nodes = len(hosts) - spares
        if not self.how.dry_run:
            check_ssh()
        checked = self._checked(nodes, processes)
        run = SshRun(
            hosts=hosts,
            processes_per_node=processes,
            workplace=os.getcwd(),
            config=self.config,
            options=options,
            variables=forwarded_variables(os.environ) | variables | _patience(checked),
            agent=lambda size, meeting: self._agent(size, processes, meeting)[1:],
            sizes=_fitting_sizes(checked, nodes, processes, self.how.min_nodes),
            restarts=self._restarts,
            needs_interface=self.how.interface is None,
        )
        if self.how.dry_run:
            for host in hosts:
                print(command_line(run.command(host)))
            return 0
        return run_over_ssh(run)


def _rendezvous(how: LaunchOptions) -> Rendezvous:
    return Rendezvous(
        endpoint=how.rdzv_endpoint,
        id=how.rdzv_id,
        is_host=None if how.rdzv_is_host is None else how.rdzv_is_host == "true",
        local_addr=how.local_addr,
    )


def _check_least(min_nodes: int | None, nodes: int) -> int:
    """The minimum number of hosts of a run; raises a LaunchError if it exceeds the total."""
    least = nodes if min_nodes is None else min_nodes
    if not 1 <= least <= nodes:
        raise LaunchError(f"--min-nodes: {least} is not allowed; 1 to the number of hosts, {nodes}")
    return least


def _fitting_sizes(
    config: "RunConfig", nodes: int, processes: int, min_nodes: int | None
) -> list[int]:
    """Numbers of hosts that fit the layout, the largest first."""
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
