"""Rendezvous of a run's processes before their first collective, in a store that all can reach.

Each process publishes its settings there. Processes with different settings refuse to start, and
one that cannot start leaves a message, so that the others end within seconds instead of waiting.

On one host the store is a file in a private folder, which `launch/torchrun.py` passes in
`POLYAD_STORE`: no port is opened. Otherwise it is a TCP store of rank 0 at MASTER_ADDR:MASTER_PORT,
as in torch, or that of torchrun's agent. Neither has a password, and torch unpickles its content:
whoever can connect can run code as the user of the run. So the store listens on loopback if all
processes are on one host, and on a single address if that is known.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from polyad.parallel.addresses import STORE, listener
from polyad.parallel.dims import LayoutError

LINGER = 15.0
"""Seconds that an ending process tries to reach the others, and that rank 0 keeps the store up."""
FIRST_MINUTES = 30.0
"""Timeout for rank 0 before a configuration has been read, in minutes."""
MOST_SHOWN = 200
"""Maximum number of characters of a value in a message."""
_CONNECT = 5.0
"""Timeout of one attempt to connect, in seconds."""
_STORE_ANSWERS = 5.0
"""Timeout of a request to the store, in seconds; signals are not handled during a request."""
_LONGEST_PAUSE = 0.25


class DisagreementError(ValueError):
    """Processes with different settings: a one-line error with setting, values and hosts."""

    exit_status = 2


class MeetingError(RuntimeError):
    """A process that did not arrive, or ended before: one line on which one, and where to look.

    Args:
        line: the message.
        status: the exit status of the process that ended.
    """

    def __init__(self, line: str, status: int = 1) -> None:
        super().__init__(line)
        self.exit_status = status


def join(timeout_minutes: float = FIRST_MINUTES) -> "Meeting":
    """Returns this process's meeting with the others, which it joins at the first call.

    Args:
        timeout_minutes: how long to wait for the store, and then for the others.

    Raises:
        MeetingError: rank 0 did not arrive in time, or cannot listen.
    """
    if Meeting.here is None:
        try:
            Meeting.here = Meeting(timeout_minutes)
        except MeetingError:
            Meeting.lost = True
            raise
    Meeting.here.wait_for(timeout_minutes)
    return Meeting.here


def report_failure(line: str, status: int, *, printed: bool = False) -> None:
    """Tells the others that this process ends before it has met them; does nothing afterwards.

    Args:
        line: the error message.
        status: its exit status.
        printed: whether no other process of its host has to print it; else `may_print` follows.
    """
    with suppress(MeetingError, ValueError, OSError, RuntimeError):  # nobody is there to read it
        if _others_may_wait():
            join(LINGER / 60).report_failure(line, status, printed=printed)


def may_print(patience: float) -> bool:
    """Returns whether this process should print why the run ends: one report per host is enough.

    If that cannot be known, rank 0 is given time to report, and then the first process of this
    host: the launcher ends this process after a report.

    Args:
        patience: seconds to wait for an earlier process.
    """
    with suppress(MeetingError, ValueError, OSError, RuntimeError):
        if _others_may_wait():
            return join(LINGER / 60).may_print(patience)
    if os.environ.get("RANK", "0") != "0":
        time.sleep(patience * (1 + _has_one_before()))
    return True


def has_met() -> bool:
    """Returns whether this process has met the others, or knows that they end."""
    return dist.is_initialized() or (Meeting.here is not None and Meeting.here.is_over)


def _has_one_before() -> bool:
    return os.environ.get("LOCAL_RANK", "0") != "0"


def _others_may_wait() -> bool:
    """Returns whether others may be waiting in the meeting; later, the group detects failures."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and not dist.is_initialized() and not Meeting.lost


def comparison(told: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Lists the differences between processes, one line per name.

    Args:
        told: the name of each process, and its facts.

    Returns:
        Lines such as "train.steps: 6 on a, 9 on b"; empty if all are equal.
    """
    lines = []
    for name in dict.fromkeys(name for _, facts in told for name in facts):
        groups: dict[str, list[str]] = {}
        for process, facts in told:
            groups.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(groups) > 1:
            shown = ", ".join(f"{_cut(value)} on {_some(names)}" for value, names in groups.items())
            lines.append(f"{name}: {shown}")
    return lines


def _cut(value: str) -> str:
    return value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}…"


def _some(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - 5} more" if len(unique) > 5 else ""
    return ", ".join(unique[:5]) + more


class Meeting:
    """One process's view of the meeting: see `join`."""

    here: "Meeting | None" = None
    """The meeting of this process, once it has found the store."""
    lost = False
    """Whether it did not find the store in time."""

    def __init__(self, timeout_minutes: float) -> None:
        if "RANK" not in os.environ:
            raise LayoutError(
                f"WORLD_SIZE: {os.environ['WORLD_SIZE']} in the environment, but RANK is missing, "
                f"and this process is alone: unset it, or start with `polyad launch` or torchrun"
            )
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.wait_for(timeout_minutes)
        self._host = socket.gethostname()
        self._node = f"{os.environ.get('GROUP_RANK', '')} {self._host}"
        self._agents = STORE not in os.environ and _agent_has_store()
        self.is_over = False
        """Whether this process has met the others, or has sent or heard that the run ends."""
        self._store = self._opened()
        self._come()

    def wait_for(self, minutes: float) -> None:
        """Sets how long the next waits may take."""
        self._minutes, self._until = minutes, time.monotonic() + 60 * minutes

    def _come(self) -> None:
        came = f"came/{self._rank}"
        with self._rank_zero_is_there():
            if self._agents and self._store.check([came]):
                raise MeetingError(
                    "torchrun's store has the addresses of processes that ended, and a start after "
                    "them finds no other: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all hosts, "
                    "as `polyad launch` does"
                )
            self._store.set(came, self._host)

    def meet(self, facts: Mapping[str, str]) -> Store:
        """Waits for all processes, and compares their settings.

        Args:
            facts: names and values that must be equal on every process.

        Returns:
            The store, for `init_process_group`.

        Raises:
            DisagreementError: on every process, if the facts of one differ from those of rank 0.
            MeetingError: one did not arrive in time, or ended before it arrived.
        """
        self.agree("facts", facts)
        with self._rank_zero_is_there():
            self._store.add("met", 1)
            self._wait(lambda: self._store.add("met", 0) >= self._size)
        self.is_over = True
        self._store.set_timeout(timedelta(minutes=self._minutes))
        return PrefixStore("group", self._store)

    def agree(self, name: str, facts: Mapping[str, str]) -> None:
        """Compares some settings of processes that have yet to meet.

        Args:
            name: the name of this comparison, the same on all processes.
            facts: as in `meet`.

        Raises:
            DisagreementError, MeetingError: as in `meet`.
        """
        mine: dict[str, Any] = {"host": self._name(), "facts": dict(facts)}
        first = json.loads(self.broadcast_from_rank0(name, json.dumps(mine)))
        differences = comparison([(each["host"], each["facts"]) for each in (first, mine)])
        if differences:
            others = [each.partition(":")[0] for each in differences[1:]]
            more = f"; {_some(others)} differ too" if others else ""
            line = f"{differences[0]}; all processes need the same{more}"
            self.report_failure(line, DisagreementError.exit_status, disagreement=True)
            raise DisagreementError(line)

    def broadcast_from_rank0(self, name: str, value: str | None) -> str:
        """Broadcasts a value from rank 0 to processes that have yet to meet.

        Args:
            name: the name of the value; not used before.
            value: the value on rank 0; ignored on the others.

        Raises:
            MeetingError: rank 0 did not arrive in time, or ended before it sent the value.
        """
        with self._rank_zero_is_there():
            if self._rank == 0:
                self._store.set(f"from-0/{name}", value or "")
            self._wait(lambda: self._store.check([f"from-0/{name}"]))
            return self._store.get(f"from-0/{name}").decode()

    def report_failure(
        self, line: str, status: int, *, printed: bool = False, disagreement: bool = False
    ) -> None:
        """See the function `report_failure`; only the first failure counts."""
        if not self.is_over:
            self.is_over = True
            if self._store.add("failures", 1) == 1:
                failure = {"host": self._name(), "line": line, "status": status}
                self._store.set("failure", json.dumps(failure | {"disagreement": disagreement}))
        if printed:
            self._store.add(f"printed/{self._node}", 1)
            self._store.add("ended", 1)
        if printed and self._rank == 0 and STORE not in os.environ and not self._agents:
            # The store ends with this process: the others should read it first.
            until = time.monotonic() + LINGER
            while self._store.add("ended", 0) < self._size and time.monotonic() < until:
                time.sleep(0.02)

    def may_print(self, patience: float) -> bool:
        """See the function `may_print`."""
        printed = f"printed/{self._node}"
        until = time.monotonic() + patience * _has_one_before()
        while not self._store.check([printed]) and time.monotonic() < until:
            time.sleep(0.02)
        is_first = self._store.add(printed, 1) == 1
        if self._rank:
            self._store.add("ended", 1)
        return is_first

    def _name(self) -> str:
        return f"{self._host} (rank {self._rank})"

    @contextmanager
    def _rank_zero_is_there(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise MeetingError(
                f"rank 0 ended before all processes had met: look at the output of "
                f"{os.environ['MASTER_ADDR']}"
            ) from error

    def _wait(self, done: Callable[[], bool]) -> None:
        pause = 0.005
        while not done():
            if self._store.check(["failure"]):
                self._end_with(json.loads(self._store.get("failure")))
            if time.monotonic() > self._until:
                raise MeetingError(self._missing())
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, 1.5 * pause)

    def _end_with(self, failure: dict[str, Any]) -> None:
        self.is_over = True
        if failure["disagreement"]:
            raise DisagreementError(failure["line"])
        raise MeetingError(
            f"{failure['host']} ended before the first step: {failure['line']}", failure["status"]
        )

    def _missing(self) -> str:
        """Lists the processes that have not arrived."""
        absent = [rank for rank in range(self._size) if not self._store.check([f"came/{rank}"])]
        if not absent:  # they arrived, and left without a message
            return f"not all of {self._size} processes came to agree within {self._minutes:g} min"
        return (
            f"{len(absent)} of {self._size} processes did not come within {self._minutes:g} min "
            f"(parallel.timeout_minutes): ranks {_some([str(rank) for rank in absent])}"
        )

    def _opened(self) -> Store:
        # These stores outlive a restart of their processes.
        restart = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if STORE in os.environ:
            return PrefixStore(restart, FileStore(os.environ[STORE], -1))
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosting = self._rank == 0 and not self._agents
        options: dict[str, Any] = {
            "wait_for_workers": False,
            "timeout": timedelta(seconds=_STORE_ANSWERS),
        }
        if hosting and (listening := listener(host, port)) is not None:
            options["master_listen_fd"] = listening.detach()
        if not hosting:
            self._reach(host, port)
        try:
            store = TCPStore(host, port, self._size, hosting, **options)
        except dist.DistError as error:
            task = "listen" if hosting else "reach the store of rank 0"
            raise MeetingError(
                f"MASTER_PORT: {port}: rank {self._rank} cannot {task} there, at {host} "
                f"(MASTER_ADDR): {str(error).splitlines()[0]}"
            ) from error
        return PrefixStore(restart, store) if self._agents else store

    def _reach(self, host: str, port: int) -> None:
        """Waits until rank 0 listens: torch prints a stack trace for a failed attempt."""
        while True:
            try:
                socket.create_connection((host, port), _CONNECT).close()
                return
            except OSError as error:
                if time.monotonic() > self._until:
                    raise MeetingError(
                        f"rank 0 was not at {host}:{port} (MASTER_ADDR, MASTER_PORT) within "
                        f"{self._minutes:g} min ({error.strerror or error}): look at the output of "
                        f"that host, and whether this one reaches it"
                    ) from error
                time.sleep(_LONGEST_PAUSE)


def _agent_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == str(True)
