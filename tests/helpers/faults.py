"""Fault injection on a cluster: a schedule of faults from a seed, and their execution.

Hosts are network namespaces (`tests/helpers/hosts.py`) on which `polyad launch --via ssh` has
started a run. Faults are scheduled by step, so that a schedule does not depend on the speed of the
machine.
"""

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from polyad.parallel.checkpoint.keeping import complete_checkpoints
from tests.helpers.hosts import Host, SshServers

FREEZE = 20.0
"""Duration in seconds for which a worker is paused."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and when it is due."""

    step: int
    """The fault is due when the run has recorded this step."""
    kind: str
    host: int
    """The number of its host, from 0."""
    worker: int
    """The number of the worker on that host, from 0."""
    seconds: float
    """How long it lasts."""


class Launcher(Protocol):
    """The command that started a run."""

    def kill(self) -> None:
        """Kills it."""

    def start(self) -> None:
        """Starts it, like a user or a scheduler."""


@dataclass(frozen=True)
class Cluster:
    """Hosts, and the run on them."""

    hosts: Sequence[Host]
    servers: SshServers
    run: Path
    """The run's folder, on a file system of its own."""
    launcher: Launcher

    def workers(self, host: Host | None = None) -> list[int]:
        """Ids of the processes that train on one host, or on all."""
        hosts = self.hosts if host is None else [host]
        return [each for one in hosts for each in one.running("polyad.launch", "train")]

    def agents(self, host: Host) -> list[int]:
        """Ids of a host's torchrun."""
        return host.running("polyad.launch.torchrun", "train")

    def newest_checkpoint(self) -> Path | None:
        """The newest complete one."""
        return next(reversed(complete_checkpoints(self.run / "checkpoints")), None)


@dataclass(frozen=True)
class Done:
    """A fault that was injected."""

    what: str
    """The affected host and processes, in words."""
    victims: Set[int] = frozenset()
    """Processes that it has ended or stopped."""
    end: Callable[[], object] = lambda: None
    """Ends it, after its time."""


def do(fault: Fault, cluster: Cluster) -> Done:
    """Injects a fault into a running run.

    Args:
        fault: the fault.
        cluster: the cluster.

    Returns:
        What was done, and how to end it.
    """
    host = cluster.hosts[fault.host]
    return KINDS[fault.kind].do(fault, host, cluster)


def _signal_worker(number: int, fault: Fault, host: Host, cluster: Cluster) -> Done:
    workers = cluster.workers(host)
    worker = workers[fault.worker % len(workers)]
    _send(worker, number)
    going_on = signal.SIGCONT if fault.seconds else 0
    return Done(f"process {worker} on {host.alias}", {worker}, lambda: _send(worker, going_on))


def _kill_worker(fault: Fault, host: Host, cluster: Cluster) -> Done:
    return _signal_worker(signal.SIGKILL, fault, host, cluster)


def _stop_worker(fault: Fault, host: Host, cluster: Cluster) -> Done:
    return _signal_worker(signal.SIGSTOP, fault, host, cluster)


def _kill_agent(fault: Fault, host: Host, cluster: Cluster) -> Done:
    agents, workers = cluster.agents(host), cluster.workers(host)
    for agent in agents:
        _send(agent, signal.SIGKILL)
    return Done(f"torchrun on {host.alias}", {*agents, *workers})


def _cut_connection(fault: Fault, host: Host, cluster: Cluster) -> Done:
    """Kills the host's end of the launcher's connection, with which its agent must end."""
    victims = {*cluster.agents(host), *cluster.workers(host)}
    ends = host.running("polyad.launch.via.remote")
    for end in ends:
        _send(end, signal.SIGKILL)
    return Done(f"process {ends} on {host.alias}", victims | set(ends))


def _kill_launcher(fault: Fault, host: Host, cluster: Cluster) -> Done:
    cluster.launcher.kill()
    return Done("polyad launch; started again at once", end=cluster.launcher.start)


def _link_down(fault: Fault, host: Host, cluster: Cluster) -> Done:
    host.link("down")
    return Done(f"{host.alias} for {fault.seconds:g} s", end=lambda: host.link("up"))


def _slow_link(fault: Fault, host: Host, cluster: Cluster) -> Done:
    host.limit(1)
    return Done(f"{host.alias} for {fault.seconds:g} s: 1 Mbit/s", end=host.free)


def _lossy_link(fault: Fault, host: Host, cluster: Cluster) -> Done:
    how = host.lose()
    return Done(f"{host.alias} for {fault.seconds:g} s: {how}", end=host.free)


def _lose_host(fault: Fault, host: Host, cluster: Cluster) -> Done:
    victims = set(host.processes())
    host.link("down")  # first: nobody hears of the end of its processes
    host.kill()

    def comes_back() -> None:
        host.link("up")
        cluster.servers.start(host)

    return Done(f"{host.alias} for {fault.seconds:g} s", victims, comes_back)


def _fill_disk(fault: Fault, host: Host, cluster: Cluster) -> Done:
    filler = cluster.run.parent / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    with suppress(OSError), filler.open("ab", buffering=0) as file:
        while True:
            file.write(b"0")
    return Done(f"for {fault.seconds:g} s", end=lambda: filler.unlink(missing_ok=True))


def _damage_checkpoint(fault: Fault, host: Host, cluster: Cluster) -> Done:
    """Damages the newest checkpoint, and kills a worker, so that it is read."""
    newest = cluster.newest_checkpoint()
    if newest is not None:
        files = sorted((each.stat().st_size, each) for each in newest.iterdir())
        size, largest = files[-1]
        with largest.open("r+b") as file:
            file.seek(size // 2)
            byte = file.read(1)
            file.seek(size // 2)
            file.write(bytes([byte[0] ^ 1]))
    done = _kill_worker(fault, host, cluster)
    name = "none" if newest is None else newest.name
    return Done(f"{name}, and the end of {done.what}", done.victims)


class Kind(NamedTuple):
    """A kind of faults."""

    do: Callable[[Fault, Host, Cluster], Done]
    least: float = 0
    """Minimum duration in seconds; 0: instantaneous."""
    most: float = 0
    """Maximum duration in seconds."""
    passes: bool = False
    """Whether the run's processes may survive it; otherwise they must restart."""


KINDS = {
    "worker killed": Kind(_kill_worker),
    "worker stopped for good": Kind(_stop_worker),
    "worker stopped for 20 s": Kind(_stop_worker, FREEZE, FREEZE, passes=True),
    "agent killed": Kind(_kill_agent),
    "connection killed": Kind(_cut_connection),
    "launcher killed": Kind(_kill_launcher),
    "link down": Kind(_link_down, 3, 8, passes=True),
    "link slow": Kind(_slow_link, 10, 20, passes=True),
    "link loses packets": Kind(_lossy_link, 10, 20, passes=True),
    "host gone": Kind(_lose_host, 5, 20),
    "disk full": Kind(_fill_disk, 60, 60),
    "checkpoint damaged": Kind(_damage_checkpoint),
}
"""All kinds of faults."""


def schedule(
    seed: int,
    count: int,
    steps: Sequence[int],
    *,
    hosts: int,
    workers: int,
    kinds: Sequence[str] = tuple(KINDS),
) -> list[Fault]:
    """Draws faults in the order of their steps. No kind is repeated before all have occurred.

    Args:
        seed: seed of the schedule.
        count: number of faults; fewer if there are fewer steps.
        steps: steps at which they may be due, over which they are spread.
        hosts: number of hosts.
        workers: number of workers per host.
        kinds: kinds of faults.
    """
    chance = random.Random(seed)
    count = min(count, len(steps))
    order: list[str] = []
    while len(order) < count:
        order += chance.sample(kinds, len(kinds))
    found = []
    for number, kind in enumerate(order[:count]):
        first, last = number * len(steps) // count, (number + 1) * len(steps) // count
        found.append(
            Fault(
                step=chance.choice(steps[first:last]),
                kind=kind,
                host=chance.randrange(hosts),
                worker=chance.randrange(workers),
                seconds=round(chance.uniform(KINDS[kind].least, KINDS[kind].most), 1),
            )
        )
    return found


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own in memory, which can be filled.

    Args:
        folder: where; it is made.
        megabytes: its size.

    Raises:
        OSError: this machine does not mount any.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{folder}: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def lives(process: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)
