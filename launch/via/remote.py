"""`python -m polyad.launch.via.remote`: the remote end of an SSH connection, with a host's agent.

Its task is sent as JSON in the first line of standard input, so that no user text passes through
the remote shell, and no variables show up in process lists. Further lines are signals to forward
and heartbeats. The agent ends with its connection, so that a host that the launcher cannot reach
does not continue training beside those that took over.

It imports neither torch nor configurations, so that a host answers in a fraction of a second.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from polyad.data.files import digest_of
from polyad.train.errors import STOP_SIGNALS

BEAT = 5.0
"""Seconds between two heartbeats."""
SILENCE = 30.0
"""Seconds without a heartbeat after which the agent is ended."""
TERMINATION = 5.0
"""Seconds between SIGTERM and SIGKILL for an agent that lost its launcher."""
AGENT_KILLED = 254
"""Exit status if the agent was killed by a signal from elsewhere, such as Linux's out-of-memory
killer. Its workers end with it."""


def main() -> int:
    """Executes the task in the first line.

    Returns:
        The exit status, as in `Agent.watch`.
    """
    task = json.loads(sys.stdin.readline() or "{}")
    if task.get("do") == "look":
        print(json.dumps(asdict(look(**task["look"]))), flush=True)
        return 0
    if task.get("do") == "run":
        return Agent(task["words"], task["variables"], task["processes"]).watch()
    print(
        "polyad: error: polyad.launch.via.remote is started by `polyad launch --via ssh`",
        file=sys.stderr,
    )
    return 2


@dataclass(frozen=True)
class Look:
    """Facts that a host reports before anything starts."""

    name: str
    machine: str
    own_addresses: list[str]
    endpoint_addresses: list[str]
    """The addresses of the first host (the rendezvous), as resolved on this one."""
    port_free: bool
    digests: dict[str, str | None]
    """Digests of files; None if a file cannot be read."""
    agents: list[str]
    """The rendezvous (torchrun's --rdzv-id) of agents running on it."""


def look(endpoint: str, port: int, files: Sequence[str]) -> Look:
    """Collects facts about this host; agents connect at a port of the endpoint, and need the
    files."""
    name = socket.gethostname()
    return Look(
        name=name,
        machine=_machine(),
        own_addresses=_addresses(name),
        endpoint_addresses=_addresses(endpoint),
        port_free=_port_is_free(port),
        digests=digests(files),
        agents=_agents(),
    )


def _machine() -> str:
    """Identifies a machine with several names, by its boot and its network."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def _addresses(name: str) -> list[str]:
    try:
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def _port_is_free(port: int) -> bool:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        with socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6
        ):
            return True
    except OSError:
        return False


def _agents() -> list[str]:
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        options = dict(pairwise(words))
        if "polyad.launch.torchrun" in words and "--rdzv-id" in options:
            found.append(options["--rdzv-id"])
    return sorted(set(found))


def digests(files: Sequence[str]) -> dict[str, str | None]:
    """The digest of each file; None if it cannot be read."""
    found: dict[str, str | None] = {}
    for file in files:
        found[file] = None
        with contextlib.suppress(OSError):
            found[file] = digest_of(Path(file))
    return found


class Agent:
    """A host's torchrun, which runs as long as its launcher sends heartbeats.

    Args:
        words: the command.
        variables: added to the environment.
        processes: number of workers, among which this host's cores are divided.
    """

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], processes: int) -> None:
        from polyad.launch.machine import END_WITH_PARENT, prepare_environment, share_cores

        os.environ.update(variables)
        prepare_environment()
        share_cores(processes)
        # Its own session: signals at the end of the connection reach it only through this process.
        self._process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {END_WITH_PARENT: str(os.getpid())},
        )
        self._lines: queue.Queue[str] = queue.Queue()

    def watch(self) -> int:
        """Forwards signals until the agent ends, or the launcher is silent.

        Returns:
            The agent's status; 128 + n if a termination signal came before its handlers were set;
            `AGENT_KILLED` if another signal ended it; 1 without a launcher.
        """
        threading.Thread(target=self._read, daemon=True).start()
        heard = time.monotonic()
        while self._process.poll() is None:
            try:
                line = self._lines.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() - heard > SILENCE:
                    return self._abandon()
                continue
            heard = time.monotonic()
            if not line:  # the connection has closed
                return self._abandon()
            word, _, number = line.strip().partition(" ")
            if word == "signal" and number.isdecimal():
                self._process.send_signal(int(number))
            elif word == "end":
                return self._abandon()
        status = self._process.returncode
        if status >= 0:
            return status
        if -status in STOP_SIGNALS:  # it had no handlers yet
            return 128 - status
        line = f"torchrun was ended by {signal.Signals(-status).name}, and this host's processes"
        print(f"polyad: error: {line} with it", file=sys.stderr, flush=True)
        return AGENT_KILLED

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(line)
        self._lines.put("")

    def _abandon(self) -> int:
        """Ends the agent and its workers, which have sessions of their own and may be stuck."""
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._process.pid)
            family = [tree, *tree.children(recursive=True)]
            self._process.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs(family, timeout=TERMINATION)
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return 1


if __name__ == "__main__":
    sys.exit(main())
