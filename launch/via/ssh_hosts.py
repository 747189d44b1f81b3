"""The hosts of `polyad launch --via ssh`: how to reach them, and checks before anything starts."""

import hashlib
import ipaddress
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from polyad.launch.via.agent import meeting_words
from polyad.launch.via.hosts import DEFAULT_PORT, MAX_PORT, LaunchError
from polyad.launch.via.remote import Look, digests
from polyad.train.config.run import find_config
from polyad.train.errors import one_line, shown

CONNECT_TIMEOUT = 10
"""Seconds until a host that does not answer counts as unreachable."""

FORWARDED = (
    "POLYAD_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_",
    "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_", "HF_", "UCX_", "FI_",
)  # fmt: skip
"""Name prefixes of environment variables that are forwarded to hosts."""


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """Options of `--via ssh`.

    Raises:
        LaunchError: a value is not valid.
    """

    hostfile: Path | None = None
    ssh_config: Path | None = None
    """A configuration file of the OpenSSH client, for users, ports, keys and jumps; None: the
    user's."""
    port: int = DEFAULT_PORT
    """Port of the rendezvous on the first host."""
    wait_minutes: float = 30.0
    """How long to wait for lost hosts."""

    def __post_init__(self) -> None:
        if self.hostfile is None:
            raise LaunchError("--hostfile: is missing; --via ssh needs a file of `HOST slots=N`")
        if not 1024 <= self.port <= MAX_PORT:
            raise LaunchError(f"--port: {self.port} is not allowed; 1024 to {MAX_PORT}")
        if self.ssh_config is not None and not self.ssh_config.is_file():
            raise LaunchError(f"--ssh-config: {str(self.ssh_config)!r} is not a file")


@dataclass(frozen=True, kw_only=True)
class SshRun:
    """A run on several hosts, checked by `launch`."""

    hosts: Sequence[str]
    """The hosts on which it starts, then its spare hosts."""
    processes_per_node: int
    workplace: str
    """The folder on every host to which paths in the configuration are relative."""
    config: Path
    options: SshOptions
    variables: Mapping[str, str]
    """Added to the environment of every agent."""
    agent: Callable[[int, Sequence[str]], list[str]]
    """Returns an agent's words after Python, from the number of nodes and torchrun's rendezvous
    options."""
    sizes: Sequence[int]
    """Numbers of hosts that fit the layout, the largest first."""
    restarts: int
    """Maximum number of restarts after lost hosts."""
    needs_interface: bool
    """Whether hosts whose own name resolves to a loopback address cannot communicate."""

    @property
    def name(self) -> str:
        """The name of its agents' rendezvous."""
        digest = hashlib.sha256(f"{self.workplace} {self.config}".encode()).hexdigest()[:12]
        return f"polyad-{digest}"

    @property
    def file(self) -> str:
        """The configuration file, which may be a shipped one."""
        return str(find_config(self.config))

    def command(self, host: str) -> list[str]:
        """The command that opens a connection, through which the task is sent."""
        ssh = [shutil.which("ssh") or "ssh", "-T"]
        if self.options.ssh_config is not None:
            ssh += ["-F", str(self.options.ssh_config)]
        for option in (
            "BatchMode=yes",
            f"ConnectTimeout={CONNECT_TIMEOUT}",
            *("ServerAliveInterval=5", "ServerAliveCountMax=3", "LogLevel=ERROR"),
        ):
            ssh += ["-o", option]
        there = shlex.join([sys.executable, "-m", "polyad.launch.via.remote"])
        return [*ssh, "--", host, f"cd {shlex.quote(self.workplace)} && exec {there}"]

    def task(self, host: str, hosts: Sequence[str]) -> dict[str, object]:
        """The task for a host's end of the connection."""
        first = hosts[0]
        endpoint = f"[{first}]" if ":" in first else first
        where = f"{endpoint}:{self.options.port}"
        meeting = meeting_words(where, self.name, host == first, host)
        return {
            "do": "run",
            "words": self.agent(len(hosts), [*meeting, "--tee", "2"]),
            "variables": dict(self.variables)
            | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: "},
            "processes": self.processes_per_node,
        }


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for libraries and Polyad in this command's environment."""
    return {name: text for name, text in environment.items() if name.startswith(FORWARDED)}


def check_ssh() -> None:
    """Raises a LaunchError if there is no OpenSSH client."""
    if shutil.which("ssh") is None:
        raise LaunchError("--via: ssh needs OpenSSH's client, which is not on the PATH")


def check_hosts(run: SshRun, hosts: list[str]) -> None:
    """Checks all hosts in parallel, before anything starts.

    Args:
        run: the run.
        hosts: its hosts; the first one has the rendezvous.

    Raises:
        LaunchError: one is unreachable or duplicate; files differ; or the hosts cannot connect.
    """
    seen = look_at(run, hosts)
    for host, found in seen.items():
        if isinstance(found, str):
            raise LaunchError(f"--hostfile: {host} cannot be used: {found}")
    looks = {host: found for host, found in seen.items() if isinstance(found, Look)}
    machines: dict[str, str] = {}
    here = digests([run.file])
    for host, look in looks.items():
        other = machines.setdefault(look.machine, host)
        if other != host:
            raise LaunchError(
                f"--hostfile: {other} and {host} are the same machine, {look.name}; list each "
                "machine once, with all its slots"
            )
        for file, digest in look.digests.items():
            if digest != here[file]:
                problem = "cannot be read" if digest is None else "is another file than here"
                raise LaunchError(
                    f"{file}: {problem} on {host}; all hosts have to see the same files"
                )
    if len(hosts) == 1:
        return
    _check_addresses(run, hosts[0], looks)


def _check_addresses(run: SshRun, first: str, looks: Mapping[str, Look]) -> None:
    for host, look in looks.items():
        if host != first and not _reachable(look.endpoint_addresses):
            resolved = ", ".join(look.endpoint_addresses) or "nothing"
            raise LaunchError(
                f"--hostfile: {first}, the rendezvous host, resolves to {resolved} on {host}; on "
                "every host it has to resolve to an address that the others can reach"
            )
        if run.needs_interface and not _reachable(look.own_addresses):
            resolved = ", ".join(look.own_addresses) or "unknown"
            raise LaunchError(
                f"--interface: is missing; {host} calls itself {look.name}, which resolves to "
                f"{resolved} there, an address that no other host can reach: name the network "
                "interface, as in --interface eth0"
            )
    if not looks[first].port_free:
        raise LaunchError(
            f"--port: {run.options.port} is in use on {first}, the rendezvous host; choose another "
            "one"
        )


def _reachable(addresses: Sequence[str]) -> bool:
    return any(not ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses)


def look_at(run: SshRun, hosts: Sequence[str]) -> dict[str, Look | str]:
    """Queries all hosts in parallel.

    Args:
        run: how to reach them.
        hosts: the hosts; the first one has the rendezvous.

    Returns:
        What each host reports (`polyad.launch.via.remote.look`), or why it reports nothing.
    """
    look = {"endpoint": hosts[0], "port": run.options.port, "files": [run.file]}
    question = json.dumps({"do": "look", "look": look}) + "\n"

    def ask(host: str) -> Look | str:
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


def _answer(said: str) -> Look | str:
    """Parses a host's report in its last line; or returns why it is not valid."""
    last = (said.strip().splitlines() or [""])[-1]
    try:
        tree = json.loads(last)
    except (ValueError, RecursionError):
        tree = None
    names = [field.name for field in fields(Look)]
    if isinstance(tree, dict) and tree.keys() >= set(names):
        return Look(**{name: tree[name] for name in names})
    return f"it answered {shown(last)}" if last else "it ended without an answer"
