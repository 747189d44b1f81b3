"""Two hosts on one machine: network namespaces joined by a pair of virtual interfaces."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """A network namespace with an address of its own; files are shared with all others."""

    name: str
    address: str
    interface: str

    @property
    def inside(self) -> list[str]:
        """Words before a command that run it on this host; its process id stays the same."""
        return ["ip", "netns", "exec", self.name]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts that reach each other and nothing else; skips the test where it cannot.

    Names carry this process's id, so that several suites can run at once.
    """
    if shutil.which("ip") is None:
        pytest.skip("two hosts need `ip netns`, of Debian's iproute2")
    if os.geteuid() != 0:
        pytest.skip("two hosts are network namespaces, which need root")
    pid = os.getpid()
    hosts = tuple(Host(f"polyad-{pid}-{i}", f"10.77.0.{i}", f"pv{pid}-{i}") for i in (1, 2))
    try:
        for number, host in enumerate(hosts):
            made = subprocess.run(["ip", "netns", "add", host.name], capture_output=True, text=True)
            if made.returncode and number == 0:
                pytest.skip(f"this machine makes no network namespaces: {made.stderr.strip()}")
            made.check_returncode()
        _join(*hosts)
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:  # their interfaces go with them
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def _join(first: Host, second: Host) -> None:
    _ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
    for host in (first, second):
        _ip("link", "set", host.interface, "netns", host.name)
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
        _ip("-n", host.name, "link", "set", "lo", "up")
        _ip("-n", host.name, "link", "set", host.interface, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
