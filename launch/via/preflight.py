"""What `polyad launch --via ssh` finds out about its hosts before anything starts there."""

import hashlib
import ipaddress
import json
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from polyad.launch.via.hosts import LaunchError
from polyad.train.config.run import find_config
from polyad.train.errors import one_line, shown

ANSWER = {"name", "machine", "own_addresses", "endpoint_addresses", "port_free", "digests"}
"""Keys of what `polyad.launch.via.remote.look` says."""
CONNECT_TIMEOUT = 10
"""Seconds until a host that does not answer counts as out of reach."""


class Hosts(Protocol):
    """A run over hosts, as far as this room asks."""

    @property
    def config(self) -> Path:
        """The run's file."""
        ...

    @property
    def port(self) -> int:
        """Where the agents meet, on the first host."""
        ...

    @property
    def needs_interface(self) -> bool:
        """Whether hosts whose own name is a loopback address cannot exchange anything."""
        ...

    def command(self, host: str) -> list[str]:
        """The words that open a connection."""
        ...


def check_hosts(run: Hosts, hosts: list[str]) -> None:
    """Looks at every host at once, before anything starts.

    Args:
        run: what shall run.
        hosts: where; the agents meet on the first.

    Raises:
        LaunchError: one is out of reach, or stands twice; files differ; the hosts cannot meet.
    """
    seen = look_at(run, hosts)
    for host, found in seen.items():
        if isinstance(found, str):
            raise LaunchError(f"--hostfile: {host} cannot be used: {found}")
    looks = {host: found for host, found in seen.items() if isinstance(found, dict)}
    machines: dict[str, str] = {}
    here = _digests([str(run.config)])
    for host, look in looks.items():
        other = machines.setdefault(look["machine"], host)
        if other != host:
            raise LaunchError(
                f"--hostfile: {other} and {host} are one machine, {look['name']}; a machine stands "
                f"there once, with all its slots"
            )
        for file, digest in look["digests"].items():
            if digest != here[file]:
                problem = "cannot be read" if digest is None else "is another file than here"
                raise LaunchError(
                    f"{file}: {problem} on {host}; all hosts have to see the same files"
                )
    if len(hosts) == 1:
        return
    _check_addresses(run, hosts[0], looks)


def _check_addresses(run: Hosts, first: str, looks: Mapping[str, Mapping[str, Any]]) -> None:
    for host, look in looks.items():
        if host != first and not _reachable(look["endpoint_addresses"]):
            resolved = ", ".join(look["endpoint_addresses"]) or "nothing"
            raise LaunchError(
                f"--hostfile: {first}, where the agents meet, is {resolved} on {host}; every host "
                f"has to know it by an address that the others reach"
            )
        if run.needs_interface and not _reachable(look["own_addresses"]):
            resolved = ", ".join(look["own_addresses"]) or "unknown"
            raise LaunchError(
                f"--interface: is missing; {host} calls itself {look['name']}, which is {resolved} "
                f"there, where no other host reaches it: name the network, as in --interface eth0"
            )
    if not looks[first]["port_free"]:
        raise LaunchError(
            f"--port: {run.port} is taken on {first}, where the agents meet; another one"
        )


def _reachable(addresses: Sequence[str]) -> bool:
    return any(not ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses)


def look_at(run: Hosts, hosts: Sequence[str]) -> dict[str, dict[str, Any] | str]:
    """Asks all hosts at once.

    Args:
        run: how they are reached.
        hosts: the agents meet on the first.

    Returns:
        For each what it says of itself (`polyad.launch.via.remote.look`), or why it says nothing.
    """
    look = {"endpoint": hosts[0], "port": run.port, "files": [str(run.config)]}
    question = json.dumps({"do": "look", "look": look}) + "\n"

    def ask(host: str) -> dict[str, Any] | str:
        try:
            done = subprocess.run(
                run.command(host),
                input=question,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=6 * CONNECT_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer in {6 * CONNECT_TIMEOUT} s"
        if done.returncode == 0:
            return _answer(done.stdout)
        return one_line((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])

    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(ask, hosts), strict=True))


def _answer(said: str) -> dict[str, Any] | str:
    """What a host said of itself, in the last line that it wrote; or why it is no answer."""
    last = (said.strip().splitlines() or [""])[-1]
    try:
        tree = json.loads(last)
    except (ValueError, RecursionError):
        tree = None
    if isinstance(tree, dict) and tree.keys() >= ANSWER:
        return tree
    return f"it answered {shown(last)}" if last else "it ended without an answer"


def _digests(files: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for file in files:
        try:
            found[file] = hashlib.sha256(find_config(Path(file)).read_bytes()).hexdigest()
        except OSError:
            found[file] = None
    return found
