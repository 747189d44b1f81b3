"""The options of `polyad launch`."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from polyad.launch.parser import Parser, non_negative, positive
from polyad.launch.via.agent import Rendezvous
from polyad.launch.via.command import MAX_RESTARTS, Launch
from polyad.launch.via.hosts import LaunchError
from polyad.launch.via.kubernetes import KubernetesJob
from polyad.launch.via.slurm import SlurmJob
from polyad.launch.via.ssh import SshOptions

Way = TypeVar("Way")
BATCH = ("slurm", "kubernetes")
ONLY_FOR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rdzv_endpoint", "rdzv_id", "rdzv_is_host", "local_addr"), ("torchrun",)),
    **dict.fromkeys(("time", "partition", "account", "qos", "signal_seconds"), ("slurm",)),
    **dict.fromkeys(("job_name", "gpus_per_node", "cpus_per_node", "memory_per_node"), BATCH),
    **dict.fromkeys(("hostfile", "ssh_config", "port", "wait_minutes"), ("ssh",)),
    "min_nodes": ("torchrun", "ssh"),
    **dict.fromkeys(("claim", "namespace"), ("kubernetes",)),
    **dict.fromkeys(("image", "mount"), BATCH),
}
"""Options, and the ways to launch that they are of."""


def launch_arguments(parser: Parser) -> None:
    """Declares the options; those of a way to launch that is not taken have to stay away."""
    add = parser.add_argument
    add(
        "--processes-per-node",
        type=positive,
        metavar="P",
        help="processes on each host; with --via ssh by default the slots of the hostfile",
    )
    add("--nodes", type=positive, metavar="N", help="number of hosts; default 1, or the hostfile's")
    add(
        "--min-nodes",
        type=positive,
        metavar="M",
        help="torchrun, ssh: hosts that the run goes on with if others are lost; default: all",
    )
    add(
        "--via",
        choices=tuple(MAX_RESTARTS),
        default="local",
        help="how processes are started; default local: on this machine",
    )
    add(
        "--max-restarts",
        type=non_negative,
        metavar="R",
        help="starts after a failure, from the newest checkpoint; default 0 local, else 3",
    )
    add("--interface", metavar="NAME", help="network interface of gloo and NCCL, for example eth0")
    add("--dry-run", action="store_true", help="only print the command or write the script")
    _torchrun_arguments(parser)
    _slurm_arguments(parser)
    _container_arguments(parser)
    _ssh_arguments(parser)
    _kubernetes_arguments(parser)


def _torchrun_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("--via torchrun", "The same command on every host.")
    add = group.add_argument
    add("--rdzv-endpoint", metavar="HOST[:PORT]", help="where the hosts meet: one of them")
    add(
        "--rdzv-id",
        metavar="ID",
        help="name of the run where hosts meet; default: made from run.folder",
    )
    add(
        "--rdzv-is-host",
        choices=("true", "false"),
        help="whether the endpoint is this host; default: found by name and address",
    )
    add("--local-addr", metavar="HOST", help="how the others reach this host; default: its name")


def _slurm_arguments(parser: Parser) -> None:
    group = parser.add_argument_group(
        "--via slurm, --via kubernetes", "What is not given is the cluster's default."
    )
    add = group.add_argument
    resource_arguments(add)
    add("--job-name", metavar="NAME", help="default: the name of run.folder")
    add("--gpus-per-node", type=positive, metavar="G", help="GPUs of each node; usually P")
    add(
        "--cpus-per-node",
        type=positive,
        metavar="C",
        help="cores of each node, for all P processes; default: whole nodes (--exclusive)",
    )
    add(
        "--signal-seconds",
        type=positive,
        metavar="S",
        help="seconds before the limit at which the job saves and requeues itself; default 120",
    )


def resource_arguments(add: Callable[..., object]) -> None:
    """Declares what any job of Slurm may ask for."""
    add("--time", metavar="LIMIT", help="for example 24:00:00, or 2-12 (days-hours)")
    for name in ("partition", "account", "qos"):
        add(f"--{name}", metavar="NAME", help="one of the cluster's")
    add("--memory-per-node", metavar="SIZE", help="for example 480G; 0 is all")


def _container_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("--via slurm, --via kubernetes: a container with Polyad")
    add = group.add_argument
    add("--image", metavar="IMAGE", help="its image; Slurm: for pyxis, or a .sif of Apptainer")
    add(
        "--mount",
        metavar="PATH",
        help="the folder with data and runs in it; default: the working folder with Slurm, /polyad "
        "with Kubernetes, where the claim stands",
    )


def _ssh_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("--via ssh", "From one machine, which stays with the run.")
    add = group.add_argument
    add("--hostfile", type=Path, metavar="FILE", help="a line for each host: HOST slots=P")
    add("--ssh-config", type=Path, metavar="FILE", help="of OpenSSH; default: the user's")
    add("--port", type=positive, metavar="PORT", help="where agents meet; default 29400")
    add(
        "--wait-minutes",
        type=positive,
        metavar="T",
        help="how long lost hosts are waited for; default 30",
    )


def _kubernetes_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("--via kubernetes")
    add = group.add_argument
    add("--claim", metavar="NAME", help="the PersistentVolumeClaim with data and run.folder")
    add("--namespace", metavar="NAME", help="default: that of kubectl's context")


def check_ways(
    values: Mapping[str, Any], via: str, only_for: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuses options of other ways to launch.

    Args:
        values: of the options, by name; None was not given.
        via: the way that is taken.
        only_for: options, and the ways that they are of.

    Raises:
        LaunchError: one was given.
    """
    for name, ways in only_for.items():
        if values[name] is not None and via not in ways:
            shown = values[name] if isinstance(values[name], int) else repr(str(values[name]))
            raise LaunchError(
                f"--{name.replace('_', '-')}: {shown} is not allowed with "
                f"--via {via}; it is an option of --via {' and '.join(ways)}"
            )


def launch_from(options: Namespace, command: Sequence[str] = ("train",)) -> int:
    """Launches as the command line says.

    Args:
        options: of the command line.
        command: of `polyad`, which each process runs.

    Returns:
        The exit status.

    Raises:
        ValueError: with an `exit_status` of 2: an option or the run is wrong.
    """
    values: dict[str, Any] = vars(options)
    check_ways(values, options.via, ONLY_FOR)
    is_host = {None: None, "true": True, "false": False}[options.rdzv_is_host]

    def asked(via: str, kind: Callable[..., Way]) -> Way | None:
        given = {
            name: values[name]
            for name, ways in ONLY_FOR.items()
            if via in ways and values[name] is not None and name != "min_nodes"
        }
        return kind(**given) if options.via == via else None

    return Launch(
        config=options.config,
        overrides=options.overrides,
        processes_per_node=options.processes_per_node,
        nodes=options.nodes,
        min_nodes=options.min_nodes,
        via=options.via,
        command=command,
        max_restarts=options.max_restarts,
        dry_run=options.dry_run,
        interface=options.interface,
        rendezvous=Rendezvous(
            endpoint=options.rdzv_endpoint,
            id=options.rdzv_id,
            is_host=is_host,
            local_addr=options.local_addr,
        ),
        ssh=asked("ssh", SshOptions),
        slurm=asked("slurm", SlurmJob) or SlurmJob(),
        kubernetes=asked("kubernetes", KubernetesJob),
    ).start()
