"""Several hosts on one machine: network namespaces on a bridge, each with its own address."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

SSHD = "/usr/sbin/sshd"
NAMES = Path("/etc/netns")
"""Where `ip netns exec` takes a host's files of /etc from."""


NO_NETEM = "what a queue of 4 kB at 2 Mbit/s does not take"
"""How a link loses packets where the kernel cannot lose them by chance."""


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

    def link(self, state: str) -> None:
        """Puts its only link `up` or `down`."""
        _ip("-n", self.name, "link", "set", self.interface, state)

    def limit(self, megabits: int) -> None:
        """Limits its outgoing rate to this many million bits per second."""
        self._queue(
            "replace", f"tbf rate {megabits}mbit burst 64kbit latency 2s"
        ).check_returncode()

    def lose(self) -> str:
        """Loses packets that leave it, until `free`.

        Returns:
            How: by chance, or by a short queue where the kernel has no netem.
        """
        if self._queue("replace", "netem loss 10%").returncode == 0:
            return "one packet of ten, by chance (tc netem)"
        self._queue("replace", "tbf rate 2mbit burst 4kb limit 4kb").check_returncode()
        return NO_NETEM

    def free(self) -> None:
        """Removes limits and losses."""
        self._queue("del")

    def _queue(self, what: str, queue: str = "") -> "subprocess.CompletedProcess[bytes]":
        words = ["tc", "qdisc", what, "dev", self.interface, "root", *queue.split()]
        return subprocess.run([*self.inside, *words], check=False, capture_output=True)

    def processes(self) -> list[int]:
        """Ids of all processes on it."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def running(self, module: str, word: str = "") -> list[int]:
        """Ids of the processes on it that run a module of Python, with a word on its command line.

        Args:
            module: as after `python -m`.
            word: of what follows; empty: any.
        """
        found = []
        for process in self.processes():
            with suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
                modules = [after for before, after in pairwise(words) if before == "-m"]
                if modules[:1] == [module] and (not word or word in words):
                    found.append(process)
        return sorted(found)

    def kill(self) -> None:
        """Kills everything on it at once, like a power failure."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


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
    host.link("up")


def _write_names(host: Host, hosts: Sequence[Host]) -> None:
    """Its /etc/hosts, in which, as in Debian's, its own name is a loopback address."""
    (NAMES / host.name).mkdir(parents=True)
    lines = ["127.0.0.1 localhost loopback", f"127.0.1.1 {socket.gethostname()}"]
    lines += [f"{each.address} {each.alias}" for each in hosts]
    (NAMES / host.name / "hosts").write_text("\n".join(lines) + "\n")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class SshServers:
    """A real sshd on each host, and a client's configuration that reaches them.

    Args:
        hosts: where they run.
        folder: for keys and logs.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        if not Path(SSHD).exists():
            pytest.skip("needs an SSH server: Debian's openssh-server")
        Path("/run/sshd").mkdir(exist_ok=True)  # it wants this one to exist
        self._folder = folder
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        (folder / "user.pub").rename(folder / "authorized")
        (folder / "sshd.conf").write_text(
            f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\n"
            f"StrictModes no\nUsePAM no\nPermitRootLogin yes\nPort 22\n"
        )
        self.client = folder / "ssh.conf"
        self.client.write_text(
            f"Host *\n  User root\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
            + "".join(f"Host {host.alias}\n  HostName {host.address}\n" for host in hosts)
            + f"Host loopback\n  HostName {hosts[0].address}\n"
        )
        for host in hosts:
            self.start(host)

    def start(self, host: Host) -> None:
        """Starts the host's server, and waits until it listens."""
        log = str(self._folder / f"{host.name}.log")
        config = str(self._folder / "sshd.conf")
        subprocess.run([*host.inside, SSHD, "-f", config, "-E", log], check=True)
        until = time.monotonic() + 10
        while "listening" not in Path(log).read_text() and time.monotonic() < until:
            time.sleep(0.02)
