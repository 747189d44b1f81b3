"""`python -m polyad.launch.via.remote`: the end of an SSH connection at which a host's agent runs.

What it shall do comes as JSON in the first line of standard input, so that a remote shell reads no
word of a user, and no variable shows in a list of processes. The lines after it are signals to hand
on and signs of life. The agent ends with its connection: a host that the launcher cannot reach any
more does not train on beside those that took over.

It imports neither torch nor what describes a run: a host answers in a fraction of a second.
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
"""Seconds between two signs of life."""
SILENCE = 30.0
"""Seconds without one after which the agent is ended."""
TERMINATION = 5.0
"""Seconds that an agent which lost its launcher has between SIGTERM and SIGKILL."""
AGENT_KILLED = 254
"""The status where a signal that nobody here sent ended the agent, as Linux does where memory runs
out. Its workers end with it."""


def main() -> int:
    """Does what the first line says.

    Returns:
        The exit status: as `Agent.watch` has it.
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
    """What a host says of itself before anything starts."""

    name: str
    machine: str
    own_addresses: list[str]
    endpoint_addresses: list[str]
    """The addresses of the first host, where the agents meet, as this one knows them."""
    port_free: bool
    digests: dict[str, str | None]
    """The digests of files; None where one cannot be read."""
    agents: list[str]
    """The meetings (torchrun's --rdzv-id) that agents on it are in."""


def look(endpoint: str, port: int, files: Sequence[str]) -> Look:
    """Looks at this host; the agents meet at a port of the endpoint, and need the files."""
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
    """What two names of one machine have in common: its start, and its network."""
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
    """The digest of each file; None where it cannot be read."""
    found: dict[str, str | None] = {}
    for file in files:
        found[file] = None
        with contextlib.suppress(OSError):
            found[file] = digest_of(Path(file))
    return found


class Agent:
    """A host's torchrun, which lives as long as its launcher is heard.

    Args:
        words: the command.
        variables: added to the environment.
        processes: workers that it will start, among which this host's cores are divided.
    """

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], processes: int) -> None:
        from polyad.launch.machine import END_WITH_PARENT, prepare_environment, share_cores

        os.environ.update(variables)
        prepare_environment()
        share_cores(processes)
        # A session of its own: what the connection's end sends to this one reaches it in order.
        self._process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {END_WITH_PARENT: str(os.getpid())},
        )
        self._lines: queue.Queue[str] = queue.Queue()

    def watch(self) -> int:
        """Hands signals on until the agent ends, or the launcher is not heard any more.

        Returns:
            The agent's status, 128 + n where a signal that asks it to end came too early for it;
            `AGENT_KILLED` where another signal ended it; 1 without a launcher.
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
            if not line:  # the connection has ended
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
