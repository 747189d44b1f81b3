"""The options of `polyad launch`."""

from argparse import Namespace
from typing import Any

from launch.parser import Parser, non_negative, positive
from launch.via.agent import Rendezvous
from launch.via.command import MAX_RESTARTS, launch
from launch.via.hosts import LaunchError
from launch.via.slurm import SlurmJob

ONLY_TORCHRUN = ("rdzv_endpoint", "rdzv_id", "rdzv_is_host", "local_addr")
ONLY_SLURM = (
    *("time", "partition", "account", "qos", "job_name"),
    *("gpus_per_node", "cpus_per_node", "memory_per_node", "signal_seconds"),
)


def launch_arguments(parser: Parser) -> None:
    """Declares the options; those of a way to launch that is not taken have to stay away."""
    add = parser.add_argument
    add(
        "--processes-per-node",
        type=positive,
        required=True,
        metavar="P",
        help="processes on each host",
    )
    add("--nodes", type=positive, default=1, metavar="N", help="number of hosts; default 1")
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
    group = parser.add_argument_group("--via slurm", "What is not given is the cluster's default.")
    add = group.add_argument
    add("--time", metavar="LIMIT", help="for example 24:00:00, or 2-12 (days-hours)")
    for name in ("partition", "account", "qos"):
        add(f"--{name}", metavar="NAME", help="one of the cluster's")
    add("--job-name", metavar="NAME", help="default: the name of run.folder")
    add("--gpus-per-node", type=positive, metavar="G", help="GPUs of each node; usually P")
    add(
        "--cpus-per-node",
        type=positive,
        metavar="C",
        help="cores of each node, for all P processes; default: whole nodes (--exclusive)",
    )
    add("--memory-per-node", metavar="SIZE", help="for example 480G; 0 is all")
    add(
        "--signal-seconds",
        type=positive,
        metavar="S",
        help="seconds before the limit at which the job saves and requeues itself; default 120",
    )


def launch_from(options: Namespace) -> None:
    """Launches as the command line says.

    Raises:
        ValueError: with an `exit_status` of 2: an option or the run is wrong.
    """
    values: dict[str, Any] = vars(options)
    for names, via in ((ONLY_TORCHRUN, "torchrun"), (ONLY_SLURM, "slurm")):
        given = [name for name in names if values[name] is not None]
        if given and options.via != via:
            raise LaunchError(
                f"--{given[0].replace('_', '-')}: {values[given[0]]!r} is not allowed with "
                f"--via {options.via}; it is an option of --via {via}"
            )
    is_host = {None: None, "true": True, "false": False}[options.rdzv_is_host]
    asked = {name: values[name] for name in ONLY_SLURM if values[name] is not None}
    launch(
        options.config,
        options.overrides,
        processes_per_node=options.processes_per_node,
        nodes=options.nodes,
        via=options.via,
        max_restarts=options.max_restarts,
        dry_run=options.dry_run,
        interface=options.interface,
        rendezvous=Rendezvous(
            endpoint=options.rdzv_endpoint,
            id=options.rdzv_id,
            is_host=is_host,
            local_addr=options.local_addr,
        ),
        job=SlurmJob(**asked),
    )
