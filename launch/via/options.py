"""Options of `polyad launch` and `polyad doctor`: how and where to start processes."""

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
"""Options, and the backends to which they apply."""

LIMIT = Argument("time limit of a job, for example 24:00:00 or 2-12 (days-hours)", "LIMIT")
PARTITION = Argument("Slurm partition", "NAME")
ACCOUNT = Argument("Slurm account that is charged", "NAME")
QOS = Argument("Slurm quality of service", "NAME")
MEMORY = Argument("memory per node, for example 480G; 0 means all", "SIZE")

TORCHRUN = Group("--via torchrun", "Run the same command on every host.")
JOB = Group(
    "--via slurm, --via kubernetes", "The cluster's defaults apply to whatever is not given."
)
CONTAINER = Group("--via slurm, --via kubernetes: a container with Polyad")
SSH = Group("--via ssh", "Start from one machine, which has to stay up for the whole run.")
KUBERNETES = Group("--via kubernetes")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How to start processes; options of other backends are not allowed."""

    processes_per_node: Annotated[
        int | None,
        Argument(
            "processes per host, one for each GPU; default with --via ssh: the slots in the "
            "hostfile",
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
            "with --via torchrun or ssh: continue with as few as M hosts when others are lost; "
            "default: all are needed",
            "M",
            positive,
        ),
    ] = None
    spare_nodes: Annotated[
        int | None,
        Argument(
            "with --via ssh: number of additional hosts in the hostfile that replace lost ones; "
            "default: none",
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
            "how often to restart from the newest checkpoint after a failure; default 0 with "
            "--via local, otherwise 3",
            "R",
            non_negative,
        ),
    ] = None
    interface: Annotated[
        str | None, Argument("network interface for gloo and NCCL, for example eth0", "NAME")
    ] = None
    dry_run: Annotated[
        bool, Argument("print the command or write the job script without starting anything")
    ] = False
    rdzv_endpoint: Annotated[
        str | None,
        Argument("rendezvous address: one of the hosts", "HOST[:PORT]", group=TORCHRUN),
    ] = None
    rdzv_id: Annotated[
        str | None,
        Argument(
            "identifier of the run at the rendezvous; default: derived from run.folder",
            "ID",
            group=TORCHRUN,
        ),
    ] = None
    rdzv_is_host: Annotated[
        Literal["true", "false"] | None,
        Argument(
            "whether this host is the rendezvous endpoint; default: detected from its name and "
            "addresses",
            group=TORCHRUN,
        ),
    ] = None
    local_addr: Annotated[
        str | None,
        Argument(
            "address at which the other hosts reach this one; default: its host name",
            "HOST",
            group=TORCHRUN,
        ),
    ] = None
    time: Annotated[str | None, LIMIT.within(JOB)] = None
    partition: Annotated[str | None, PARTITION.within(JOB)] = None
    account: Annotated[str | None, ACCOUNT.within(JOB)] = None
    qos: Annotated[str | None, QOS.within(JOB)] = None
    memory_per_node: Annotated[str | None, MEMORY.within(JOB)] = None
    job_name: Annotated[
        str | None, Argument("name of the job; default: the name of run.folder", "NAME", group=JOB)
    ] = None
    gpus_per_node: Annotated[
        int | None, Argument("GPUs to request per node, usually P", "G", positive, group=JOB)
    ] = None
    cpus_per_node: Annotated[
        int | None,
        Argument(
            "CPU cores per node, for all P processes together; default: whole nodes (--exclusive)",
            "C",
            positive,
            group=JOB,
        ),
    ] = None
    signal_seconds: Annotated[
        int | None,
        Argument(
            "how long before the time limit the job saves a checkpoint and requeues itself, in "
            "seconds; default 120",
            "S",
            positive,
            group=JOB,
        ),
    ] = None
    image: Annotated[
        str | None,
        Argument(
            "container image; with Slurm one for pyxis, or an Apptainer .sif file",
            "IMAGE",
            group=CONTAINER,
        ),
    ] = None
    mount: Annotated[
        str | None,
        Argument(
            "folder to mount, which contains data and runs; default: the working folder with "
            "Slurm, /polyad (where the claim is mounted) with Kubernetes",
            "PATH",
            group=CONTAINER,
        ),
    ] = None
    hostfile: Annotated[
        Path | None, Argument("file with one line per host: HOST slots=P", "FILE", group=SSH)
    ] = None
    ssh_config: Annotated[
        Path | None,
        Argument("OpenSSH configuration file; default: the user's own", "FILE", group=SSH),
    ] = None
    port: Annotated[
        int | None, Argument("port of the rendezvous; default 29400", "PORT", positive, group=SSH)
    ] = None
    wait_minutes: Annotated[
        int | None,
        Argument("minutes to wait for lost hosts to return; default 30", "T", positive, group=SSH),
    ] = None
    claim: Annotated[
        str | None,
        Argument(
            "PersistentVolumeClaim that holds the data and run.folder", "NAME", group=KUBERNETES
        ),
    ] = None
    namespace: Annotated[
        str | None,
        Argument(
            "Kubernetes namespace; default: that of kubectl's current context",
            "NAME",
            group=KUBERNETES,
        ),
    ] = None


def check_ways(
    values: Mapping[str, Any], via: str, only_for: Mapping[str, tuple[str, ...]]
) -> None:
    """Rejects options of other backends.

    Args:
        values: values of the options by name; None: not given.
        via: the backend in use.
        only_for: options, and the backends to which they apply.

    Raises:
        LaunchError: one was given.
    """
    for name, ways in only_for.items():
        if values[name] is not None and via not in ways:
            shown = values[name] if isinstance(values[name], int) else repr(str(values[name]))
            raise LaunchError(
                f"--{name.replace('_', '-')}: {shown} is not allowed with --via {via}; it is an "
                f"option for --via {' and '.join(ways)}"
            )


def asked_of(kind: Callable[..., Way], options: object, **more: Any) -> Way:
    """Makes the options of one backend.

    Args:
        kind: a dataclass, some of whose fields are named like options.
        options: a command's options; None: not given.
        more: other fields.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}
    names = inspect.signature(kind).parameters
    return kind(**{name: given[name] for name in names if name in given}, **more)
