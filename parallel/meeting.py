"""Where the processes of a run meet before their first collective: a store that all can reach.

There each tells what it is about to do. Processes that would do different things refuse to start,
and one that cannot start leaves word, so that the others end within seconds in place of waiting.

On one host the store is a file in a private folder, which `launch/torchrun.py` names in
`POLYAD_STORE`: nothing listens. Elsewhere it is a TCP store of rank 0 at MASTER_ADDR:MASTER_PORT,
as torch has it, or that of torchrun's agent. Neither has a password, and torch unpickles what is in
them: whoever can connect can run code as the user of the run. So a store listens on loopback where
all processes are on one host, and on one address where that is known.
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
"""Seconds in which a process that ends tries to reach the others; rank 0 lets them read so long."""
FIRST_MINUTES = 30.0
"""How long rank 0 is waited for before a configuration has been read."""
MOST_SHOWN = 200
"""Characters of a value."""
_CONNECT = 5.0
"""Seconds of one attempt to connect."""
_STORE_ANSWERS = 5.0
"""Seconds of a request to the store, in which no signal is looked at."""
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
    return _Meeting.joined(timeout_minutes).meet(facts)


def agree(name: str, facts: Mapping[str, str]) -> None:
    """Compares some of what processes are about to do, which go on to the meeting.

    Args:
        name: of this comparison, which all do.
        facts: as of `meet`.

    Raises:
        DisagreementError: on every process, if the facts of one differ from those of rank 0.
        MeetingError: rank 0 did not come in time, or a process ended before it came.
    """
    _Meeting.joined(FIRST_MINUTES).agree(name, facts)


def told_by_first(name: str, value: str | None) -> str:
    """What rank 0 says before the processes meet, on all; they go there afterwards.

    Args:
        name: of what it says; one that it has not said yet.
        value: that it says; of the others it is not looked at.

    Raises:
        MeetingError: it did not come in time, or ended before it said this.
    """
    return _Meeting.joined(FIRST_MINUTES).told_by_first(name, value)


def leave_word(line: str, status: int, *, said: bool = False) -> None:
    """Tells the others that this process ends before it has met them; does nothing afterwards.

    Args:
        line: its error.
        status: its exit status.
        said: whether no other of its host has to print it; otherwise `another_says_it` follows.
    """
    with suppress(MeetingError, ValueError, OSError, RuntimeError):  # nobody is there to hear it
        if _can_tell():
            _Meeting.joined(LINGER / 60).leave_word(line, status, said=said)


def has_met() -> bool:
    """Whether this process goes on with the others, or knows that they end."""
    return dist.is_initialized() or (_Meeting.here is not None and _Meeting.here.is_over)


def another_says_it(patience: float) -> bool:
    """Whether another process of this host says why the run ends: one line of each is enough.

    Where that cannot be known rank 0 is given time to say it, and then the first process of this
    host: whoever starts them ends this one thereupon.

    Args:
        patience: seconds that another one is given.
    """
    with suppress(MeetingError, ValueError, OSError, RuntimeError):
        if _can_tell():
            return not _Meeting.joined(LINGER / 60).speaks(patience)
    time.sleep(patience * (1 + _has_one_before()))
    return False


def is_said() -> bool:
    """Whether another process of this host has said why the run ends; never after they have met."""
    with suppress(MeetingError, ValueError, OSError, RuntimeError):
        return _can_tell() and _Meeting.joined(LINGER / 60).is_said()
    return False


def _has_one_before() -> bool:
    return os.environ.get("LOCAL_RANK", "0") != "0"


def _can_tell() -> bool:
    """Whether others may wait in the meeting: the group's processes find out by themselves."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and not dist.is_initialized() and not _Meeting.lost


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
            shown = ", ".join(f"{_cut(value)} on {_some(names)}" for value, names in groups.items())
            lines.append(f"{name}: {shown}")
    return lines


def _cut(value: str) -> str:
    return value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}…"


def _some(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - 5} more" if len(unique) > 5 else ""
    return ", ".join(unique[:5]) + more


class _Meeting:
    """One process's part in the meeting; `joined` makes it."""

    here: "_Meeting | None" = None
    """This process's, once it has found the store."""
    lost = False
    """Whether it has not found the store in time."""

    def __init__(self, timeout_minutes: float) -> None:
        if "RANK" not in os.environ:
            raise LayoutError(
                f"WORLD_SIZE: {os.environ['WORLD_SIZE']} in the environment, but RANK is missing, "
                f"and this process is alone: unset it, or start with `polyad launch` or torchrun"
            )
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._wait_for(timeout_minutes)
        self._host = socket.gethostname()
        self._node = f"{os.environ.get('GROUP_RANK', '')} {self._host}"
        self._agents = STORE not in os.environ and _agent_has_store()
        self.is_over = False
        """Whether this process has met the others, or has told or heard that the run ends."""
        self._store = self._opened()
        self._come()

    @classmethod
    def joined(cls, timeout_minutes: float) -> "_Meeting":
        """The meeting that this process is in.

        Args:
            timeout_minutes: how long it waits for the store, and then for the others.
        """
        if cls.here is None:
            try:
                cls.here = cls(timeout_minutes)
            except MeetingError:
                cls.lost = True
                raise
        cls.here._wait_for(timeout_minutes)
        return cls.here

    def _wait_for(self, minutes: float) -> None:
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
        """See the function `meet`."""
        self.agree("facts", facts)
        with self._rank_zero_is_there():
            self._store.add("met", 1)
            self._wait(lambda: self._store.add("met", 0) >= self._size)
        self.is_over = True
        self._store.set_timeout(timedelta(minutes=self._minutes))
        return PrefixStore("group", self._store)

    def agree(self, name: str, facts: Mapping[str, str]) -> None:
        """See the function `agree`."""
        mine: dict[str, Any] = {"host": self._name(), "facts": dict(facts)}
        first = json.loads(self.told_by_first(name, json.dumps(mine)))
        differences = comparison([(each["host"], each["facts"]) for each in (first, mine)])
        if differences:
            others = [each.partition(":")[0] for each in differences[1:]]
            more = f"; {_some(others)} differ too" if others else ""
            line = f"{differences[0]}; all processes need the same{more}"
            self.leave_word(line, DisagreementError.exit_status, agreement=True)
            raise DisagreementError(line)

    def told_by_first(self, name: str, value: str | None) -> str:
        """See the function `told_by_first`."""
        with self._rank_zero_is_there():
            if self._rank == 0:
                self._store.set(f"told/{name}", value or "")
            self._wait(lambda: self._store.check([f"told/{name}"]))
            return self._store.get(f"told/{name}").decode()

    def leave_word(
        self, line: str, status: int, *, said: bool = False, agreement: bool = False
    ) -> None:
        """See the function `leave_word`; only the first word is heard."""
        if not self.is_over:
            self.is_over = True
            if self._store.add("words", 1) == 1:
                word = {"host": self._name(), "line": line, "status": status}
                self._store.set("word", json.dumps(word | {"agreement": agreement}))
        if said:
            self._store.add(f"said/{self._node}", 1)
            self._store.add("ended", 1)
        if said and self._rank == 0 and STORE not in os.environ and not self._agents:
            # The store ends with this process: the others are to read it first.
            until = time.monotonic() + LINGER
            while self._store.add("ended", 0) < self._size and time.monotonic() < until:
                time.sleep(0.02)

    def speaks(self, patience: float) -> bool:
        """Whether this process says why the run ends; the first one of its host is given time."""
        until = time.monotonic() + patience * _has_one_before()
        while not self.is_said() and time.monotonic() < until:
            time.sleep(0.02)
        is_first = self._store.add(f"said/{self._node}", 1) == 1
        self._store.add("ended", 1)
        return is_first

    def is_said(self) -> bool:
        """See the function `is_said`."""
        return self._store.check([f"said/{self._node}"])

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
            if self._store.check(["word"]):
                self._hear(json.loads(self._store.get("word")))
            if time.monotonic() > self._until:
                raise MeetingError(self._missing())
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, 1.5 * pause)

    def _hear(self, word: dict[str, Any]) -> None:
        self.is_over = True
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
        # These stores outlive a start of their processes.
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
            reason = str(error).splitlines()[0]
            if hosting:
                raise MeetingError(
                    f"MASTER_PORT: {port}: rank 0 cannot listen there, at {host} (MASTER_ADDR): "
                    f"{reason}"
                ) from error
            raise MeetingError(
                f"MASTER_PORT: {port}: there is no store of rank 0 at {host} (MASTER_ADDR): "
                f"{reason}"
            ) from error
        return PrefixStore(restart, store) if self._agents else store

    def _reach(self, host: str, port: int) -> None:
        """Waits until rank 0 listens: torch prints its stack for an attempt that fails."""
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
