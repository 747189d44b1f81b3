"""Several hosts on one machine: network namespaces on a bridge, each with its own address."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.started import start

NAMES = Path("/etc/netns")
"""Where `ip netns exec` takes a host's files of /etc from."""


@dataclass(frozen=True)
class Host:
    """A network namespace with an address of its own; files are shared with all others."""

    name: str
    address: str
    alias: str
    """What it is called on all of them."""
    interface: str = "eth0"

    @property
    def inside(self) -> list[str]:
        """Words before a command that run it on this host; its process id stays the same."""
        return ["ip", "netns", "exec", self.name]

    def start(
        self,
        command: str,
        config: Path,
        nodes: Sequence["Host"],
        *more: str,
        least: int | None = None,
    ) -> subprocess.Popen[str]:
        """Starts the command that a person would give on this one of so many hosts.

        Args:
            command: of `polyad`.
            config: of a run.
            nodes: all hosts; the agents meet on the first.
            more: further words of the command.
            least: how many hosts are enough; None: all are needed.
        """
        first = nodes[0]
        words = [
            *("env", f"GLOO_SOCKET_IFNAME={self.interface}", sys.executable),
            *("-m", "polyad.launch.torchrun", "--nnodes", f"{least or len(nodes)}:{len(nodes)}"),
            *("--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{first.address}:29700", "--rdzv-id", "run"),
            *("--rdzv-conf", f"is_host={str(self is first).lower()}"),
            *("--local-addr", self.address, "-m", "polyad.launch", command, str(config), *more),
        ]
        return start([*self.inside, *words])

    def limit(self, megabits: int) -> None:
        """Limits its outgoing rate to this many million bits per second."""
        words = ["tc", "qdisc", "replace", "dev", self.interface, "root", "tbf"]
        rate = ["rate", f"{megabits}mbit", "burst", "64kbit", "latency", "2s"]
        subprocess.run([*self.inside, *words, *rate], check=True, capture_output=True)

    def kill(self) -> None:
        """Kills everything on it at once, like a power failure."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for process in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


@contextmanager
def several_hosts(count: int, *, net: int = 77) -> Iterator[tuple[Host, ...]]:
    """Creates hosts that reach each other and this machine; skips the test if impossible.

    Names carry this process's id, so that several suites can run at once.

    Args:
        count: of hosts.
        net: their addresses are 10.`net`.n.1 and so on, this machine's is 10.`net`.n.254, where n
            is made of this process's id.
    """
    if shutil.which("ip") is None:
        pytest.skip("several hosts need `ip netns`, of Debian's iproute2")
    if os.geteuid() != 0:
        pytest.skip("several hosts are network namespaces, which need root")
    pid = os.getpid()
    prefix = f"10.{net}.{pid % 251}"
    bridge = f"pb{net}-{pid}"
    hosts = tuple(
        Host(f"polyad-{net}-{pid}-{i}", f"{prefix}.{i}", f"host-{i}") for i in range(1, count + 1)
    )
    try:
        for number, host in enumerate(hosts):
            made = subprocess.run(["ip", "netns", "add", host.name], capture_output=True, text=True)
            if made.returncode and number == 0:
                pytest.skip(f"this machine makes no network namespaces: {made.stderr.strip()}")
            made.check_returncode()
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{prefix}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, host in enumerate(hosts):
            _join(host, bridge, f"pv{net}{number}-{pid}")
            _write_names(host, hosts)
        yield hosts
    finally:
        for host in hosts:  # their interfaces go with them
            host.kill()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            shutil.rmtree(NAMES / host.name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _join(host: Host, bridge: str, here: str) -> None:
    peer = ("peer", "name", host.interface, "netns", host.name)
    _ip("link", "add", here, "type", "veth", *peer)
    _ip("link", "set", here, "master", bridge)
    _ip("link", "set", here, "up")
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
    _ip("-n", host.name, "link", "set", "lo", "up")
    _ip("-n", host.name, "link", "set", host.interface, "up")


def _write_names(host: Host, hosts: Sequence[Host]) -> None:
    """Its /etc/hosts, in which, as in Debian's, its own name is a loopback address."""
    (NAMES / host.name).mkdir(parents=True)
    lines = ["127.0.0.1 localhost loopback", f"127.0.1.1 {socket.gethostname()}"]
    lines += [f"{each.address} {each.alias}" for each in hosts]
    (NAMES / host.name / "hosts").write_text("\n".join(lines) + "\n")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
