"""Where the processes of a run meet before their first collective: a store that all can reach.

There each tells what it is about to do. Processes that would do different things refuse to start,
and one that cannot start leaves word, so that the others end within seconds in place of waiting.

On one host the store is a file in a private folder, which `launch/torchrun.py` names in
`POLYAD_STORE`: nothing listens. Elsewhere it is a TCP store of rank 0 at MASTER_ADDR:MASTER_PORT,
as torch has it, or that of torchrun's agent. Neither has a password, and torch unpickles what is in
them: whoever can connect can run code as the user of the run. So a store listens on loopback where
all processes are on one host, and on one address where that is known.
"""

import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

STORE = "POLYAD_STORE"
"""The environment variable that names the file of a host's own store, in a folder of its own."""
LINGER = 15.0
"""Seconds in which a process that ends tries to reach the others; rank 0 lets them read so long."""
LOOPBACK = "127.0.0.1"
_CONNECT = 5.0
"""Seconds of one attempt to connect, after which signals are looked at."""
_LONGEST_PAUSE = 0.25


class DisagreementError(ValueError):
    """Processes that would not do the same: one line that names what, the values and the hosts."""

    exit_status = 2


class MeetingError(RuntimeError):
    """A process that did not come, or ended before: one line that says which and where to look.

    Args:
        line: what happened.
        status: the exit status of the process that ended.
    """

    def __init__(self, line: str, status: int = 1) -> None:
        super().__init__(line)
        self.exit_status = status


def meet(facts: Mapping[str, str], timeout_minutes: float) -> Store:
    """Waits for all processes, and compares what they are about to do.

    Args:
        facts: names and values that have to be the same on every process.
        timeout_minutes: how long the others are waited for.

    Returns:
        The store, for `init_process_group`.

    Raises:
        DisagreementError: on every process, if the facts of one differ from those of rank 0.
        MeetingError: one did not come in time, or ended before it came.
    """
    return _Meeting(timeout_minutes).meet(facts)


def leave_word(line: str, status: int) -> bool:
    """Tells the others that this process ends before it has met them; does nothing afterwards.

    Args:
        line: its error.
        status: its exit status.

    Returns:
        Whether every process that still waits ends with a line of its own.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return False
    if not _Meeting.over:
        try:
            _Meeting(LINGER / 60).leave_word(line, status)
        except (MeetingError, ValueError, OSError, RuntimeError):
            return False  # nobody is there to hear it
    return True


def comparison(told: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """What differs between processes, a line for each name.

    Args:
        told: what to call each process, and its facts.

    Returns:
        Lines such as "train.steps: 6 on a, 9 on b"; empty if all are the same.
    """
    lines = []
    for name in dict.fromkeys(name for _, facts in told for name in facts):
        groups: dict[str, list[str]] = {}
        for process, facts in told:
            groups.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(groups) > 1:
            shown = ", ".join(f"{value} on {_some(names)}" for value, names in groups.items())
            lines.append(f"{name}: {shown}")
    return lines


def _some(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - 5} more" if len(unique) > 5 else ""
    return ", ".join(unique[:5]) + more


class _Meeting:
    """One process's part in the meeting.

    Args:
        timeout_minutes: how long it waits for the store, and then for the others.
    """

    over = False
    """Whether this process has met the others, or has told or heard that the run ends."""

    def __init__(self, timeout_minutes: float) -> None:
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._minutes = timeout_minutes
        self._until = time.monotonic() + 60 * timeout_minutes
        self._host = socket.gethostname()
        self._agents = STORE not in os.environ and _agent_has_store()
        self._store = self._opened()

    def meet(self, facts: Mapping[str, str]) -> Store:
        """See the function."""
        mine: dict[str, Any] = {"host": self._name(), "facts": dict(facts)}
        self._store.set(f"came/{self._rank}", self._host)
        if self._rank == 0:
            self._store.set("facts", json.dumps(mine))
        self._wait(lambda: self._store.check(["facts"]))
        first = json.loads(self._store.get("facts"))
        differences = comparison([(each["host"], each["facts"]) for each in (first, mine)])
        if differences:
            others = [each.partition(":")[0] for each in differences[1:]]
            more = f"; {_some(others)} differ too" if others else ""
            line = f"{differences[0]}; all processes need the same{more}"
            self.leave_word(line, DisagreementError.exit_status, agreement=True)
            raise DisagreementError(line)
        self._store.add("met", 1)
        self._wait(lambda: self._store.add("met", 0) >= self._size)
        _Meeting.over = True
        self._store.set_timeout(timedelta(minutes=self._minutes))
        return PrefixStore("group", self._store)

    def leave_word(self, line: str, status: int, *, agreement: bool = False) -> None:
        """See the function; the first word is the one that is heard."""
        _Meeting.over = True
        if self._store.add("words", 1) == 1:
            word = {"host": self._name(), "line": line, "status": status, "time": time.time()}
            self._store.set("word", json.dumps(word | {"agreement": agreement}))
        self._store.add("ended", 1)
        if self._rank == 0 and STORE not in os.environ and not self._agents:
            # The store ends with this process: the others are to read it first.
            until = time.monotonic() + LINGER
            while self._store.add("ended", 0) < self._size and time.monotonic() < until:
                time.sleep(0.02)

    def _name(self) -> str:
        return f"{self._host} (rank {self._rank})"

    def _wait(self, done: Callable[[], bool]) -> None:
        pause = 0.005
        while True:
            try:
                if done():
                    return
                if self._store.check(["word"]):
                    self._hear(json.loads(self._store.get("word")))
            except dist.DistError as error:
                raise MeetingError(
                    f"rank 0 ended before all processes had met: look at the output of "
                    f"{os.environ['MASTER_ADDR']}"
                ) from error
            if time.monotonic() > self._until:
                raise MeetingError(self._missing())
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, 1.5 * pause)

    def _hear(self, word: dict[str, Any]) -> None:
        # The store of an agent outlives a start of its processes, and has the words of the last.
        if self._agents and word["time"] < psutil.Process().create_time():
            return
        _Meeting.over = True
        if self._rank:
            self._store.add("ended", 1)
        else:
            self.leave_word("", 0)
        if word["agreement"]:
            raise DisagreementError(word["line"])
        raise MeetingError(f"{word['host']} ended before the first step: {word['line']}",
                           word["status"])  # fmt: skip

    def _missing(self) -> str:
        """Who has not come, by rank and node."""
        absent = [rank for rank in range(self._size) if not self._store.check([f"came/{rank}"])]
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        nodes = list(dict.fromkeys(rank // local for rank in absent))
        if not absent:  # they came, and went without a word
            return f"not all of {self._size} processes came to agree within {self._minutes:g} min"
        return (
            f"{len(absent)} of {self._size} processes did not come within {self._minutes:g} min: "
            f"rank{'s'[: len(absent) > 1]} {_some([str(rank) for rank in absent])}, of node"
            f"{'s'[: len(nodes) > 1]} {_some([str(node) for node in nodes])}; look at the output "
            f"there (parallel.timeout_minutes is how long they are waited for)"
        )

    def _opened(self) -> Store:
        if STORE in os.environ:
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            return FileStore(f"{os.environ[STORE]}-{restart}", self._size)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosting = self._rank == 0 and not self._agents
        options: dict[str, Any] = {
            "wait_for_workers": False,
            "timeout": timedelta(seconds=_CONNECT),
        }
        if hosting and (listening := listener(host, port)) is not None:
            options["master_listen_fd"] = listening.detach()
        while True:
            try:
                return TCPStore(host, port, self._size, hosting, **options)
            except dist.DistError as error:
                if hosting:
                    raise MeetingError(
                        f"MASTER_PORT: {port}: rank 0 cannot listen there, at {host} "
                        f"(MASTER_ADDR): {str(error).splitlines()[0]}"
                    ) from error
                if time.monotonic() > self._until:
                    raise MeetingError(
                        f"rank 0 was not at {host}:{port} (MASTER_ADDR, MASTER_PORT) within "
                        f"{self._minutes:g} min: look at the output of that host, and whether this "
                        f"one reaches it"
                    ) from error


def _agent_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == str(True)


def is_one_host() -> bool:
    """Whether all processes are on this host, as far as the environment tells."""
    world = os.environ.get("WORLD_SIZE", "1")
    return STORE in os.environ or world in ("1", os.environ.get("LOCAL_WORLD_SIZE"))


def stay_on_loopback() -> None:
    """Makes gloo and NCCL listen on loopback, if all processes are on this host.

    An interface that the environment names is left as it is.
    """
    if not is_one_host():
        return
    for name in psutil.net_if_addrs():
        if LOOPBACK in addresses_of(name):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return


def listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens on one address of this host alone.

    Args:
        host: an address, or a name.
        port: 0 takes a free one.

    Returns:
        None where it is not certain that the others come by this address: a name may be another
        address for them, unless an interface is named. Then torch listens on all.
    """
    address = _address_of(host)
    if address is None:
        return None
    listening = socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(socket.SOMAXCONN)
    except OSError:  # not of this host, as a service's of Kubernetes: torch says what is wrong
        listening.close()
        return None
    return listening


def _address_of(host: str) -> str | None:
    if host == "localhost":
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if named_interface() is None:
            return None
    try:
        resolved = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    here = {address for name in psutil.net_if_addrs() for address in addresses_of(name)}
    found = [each for each in resolved & here if not ipaddress.ip_address(each).is_loopback]
    return found[0] if len(found) == 1 else None


def named_interface() -> str | None:
    """The network interface that the environment names for gloo, if it is one."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    return name if name in psutil.net_if_addrs() else None


def addresses_of(interface: str) -> list[str]:
    """The IPv4 addresses of a network interface of this host; empty if there is none."""
    found = psutil.net_if_addrs().get(interface, [])
    return [each.address for each in found if each.family == socket.AF_INET]
