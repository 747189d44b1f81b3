"""The options of `polyad launch` and `polyad doctor`: how processes are started, and where."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from polyad.launch.command import Argument, Group, non_negative, positive
from polyad.launch.via.hosts import LaunchError

Way = TypeVar("Way")
BATCH = ("slurm", "kubernetes")
ONLY_FOR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rdzv_endpoint", "rdzv_id", "rdzv_is_host", "local_addr"), ("torchrun",)),
    **dict.fromkeys(("time", "partition", "account", "qos", "signal_seconds"), ("slurm",)),
    **dict.fromkeys(("job_name", "gpus_per_node", "cpus_per_node", "memory_per_node"), BATCH),
    **dict.fromkeys(("hostfile", "ssh_config", "port", "wait_minutes"), ("ssh",)),
    "min_nodes": ("torchrun", "ssh"),
    "spare_nodes": ("ssh",),
    **dict.fromkeys(("claim", "namespace"), ("kubernetes",)),
    **dict.fromkeys(("image", "mount"), BATCH),
}
"""Options, and the ways to launch that they are of."""

LIMIT = Argument("for example 24:00:00, or 2-12 (days-hours)", "LIMIT")
OF_CLUSTER = Argument("one of the cluster's", "NAME")
MEMORY = Argument("for example 480G; 0 is all", "SIZE")

TORCHRUN = Group("--via torchrun", "The same command on every host.")
JOB = Group("--via slurm, --via kubernetes", "What is not given is the cluster's default.")
CONTAINER = Group("--via slurm, --via kubernetes: a container with Polyad")
SSH = Group("--via ssh", "From one machine, which stays with the run.")
KUBERNETES = Group("--via kubernetes")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How processes are started; options of a way that is not taken have to stay away."""

    processes_per_node: Annotated[
        int | None,
        Argument(
            "processes on each host; with --via ssh by default the slots of the hostfile",
            "P",
            positive,
        ),
    ] = None
    nodes: Annotated[
        int | None,
        Argument("number of hosts; default 1, or the hostfile's", "N", positive),
    ] = None
    min_nodes: Annotated[
        int | None,
        Argument(
            "torchrun, ssh: hosts that the run goes on with if others are lost; default: all",
            "M",
            positive,
        ),
    ] = None
    spare_nodes: Annotated[
        int | None,
        Argument(
            "ssh: further hosts of the file, which take the place of those that are lost; default: "
            "none",
            "S",
            positive,
        ),
    ] = None
    via: Annotated[
        Literal["local", "torchrun", "ssh", "slurm", "kubernetes"],
        Argument("how processes are started; default local: on this machine"),
    ] = "local"
    max_restarts: Annotated[
        int | None,
        Argument(
            "starts after a failure, from the newest checkpoint; default 0 local, else 3",
            "R",
            non_negative,
        ),
    ] = None
    interface: Annotated[
        str | None, Argument("network interface of gloo and NCCL, for example eth0", "NAME")
    ] = None
    dry_run: Annotated[bool, Argument("only print the command or write the script")] = False
    rdzv_endpoint: Annotated[
        str | None,
        Argument("where the hosts meet: one of them", "HOST[:PORT]", group=TORCHRUN),
    ] = None
    rdzv_id: Annotated[
        str | None,
        Argument(
            "name of the run where hosts meet; default: made from run.folder", "ID", group=TORCHRUN
        ),
    ] = None
    rdzv_is_host: Annotated[
        Literal["true", "false"] | None,
        Argument(
            "whether the endpoint is this host; default: found by name and address", group=TORCHRUN
        ),
    ] = None
    local_addr: Annotated[
        str | None,
        Argument("how the others reach this host; default: its name", "HOST", group=TORCHRUN),
    ] = None
    time: Annotated[str | None, LIMIT.within(JOB)] = None
    partition: Annotated[str | None, OF_CLUSTER.within(JOB)] = None
    account: Annotated[str | None, OF_CLUSTER.within(JOB)] = None
    qos: Annotated[str | None, OF_CLUSTER.within(JOB)] = None
    memory_per_node: Annotated[str | None, MEMORY.within(JOB)] = None
    job_name: Annotated[
        str | None, Argument("default: the name of run.folder", "NAME", group=JOB)
    ] = None
    gpus_per_node: Annotated[
        int | None, Argument("GPUs of each node; usually P", "G", positive, group=JOB)
    ] = None
    cpus_per_node: Annotated[
        int | None,
        Argument(
            "cores of each node, for all P processes; default: whole nodes (--exclusive)",
            "C",
            positive,
            group=JOB,
        ),
    ] = None
    signal_seconds: Annotated[
        int | None,
        Argument(
            "seconds before the limit at which the job saves and requeues itself; default 120",
            "S",
            positive,
            group=JOB,
        ),
    ] = None
    image: Annotated[
        str | None,
        Argument("its image; Slurm: for pyxis, or a .sif of Apptainer", "IMAGE", group=CONTAINER),
    ] = None
    mount: Annotated[
        str | None,
        Argument(
            "the folder with data and runs in it; default: the working folder with Slurm, /polyad "
            "with Kubernetes, where the claim stands",
            "PATH",
            group=CONTAINER,
        ),
    ] = None
    hostfile: Annotated[
        Path | None, Argument("a line for each host: HOST slots=P", "FILE", group=SSH)
    ] = None
    ssh_config: Annotated[
        Path | None, Argument("of OpenSSH; default: the user's", "FILE", group=SSH)
    ] = None
    port: Annotated[
        int | None, Argument("where agents meet; default 29400", "PORT", positive, group=SSH)
    ] = None
    wait_minutes: Annotated[
        int | None,
        Argument("how long lost hosts are waited for; default 30", "T", positive, group=SSH),
    ] = None
    claim: Annotated[
        str | None,
        Argument("the PersistentVolumeClaim with data and run.folder", "NAME", group=KUBERNETES),
    ] = None
    namespace: Annotated[
        str | None, Argument("default: that of kubectl's context", "NAME", group=KUBERNETES)
    ] = None


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


def asked_of(kind: Callable[..., Way], options: object, **more: Any) -> Way:
    """What is asked of one way to launch.

    Args:
        kind: a dataclass, some of whose fields are called as options.
        options: of a command; those that are None were not given.
        more: other fields.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}
    names = inspect.signature(kind).parameters
    return kind(**{name: given[name] for name in names if name in given}, **more)
