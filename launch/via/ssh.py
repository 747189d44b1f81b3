"""`polyad launch --via ssh`: a torchrun agent on each host of a hostfile, through OpenSSH.

The launcher looks at every host first, starts the agents, hands signals on, and shows what they
say with the host before it. When a host is lost, it ends the others and starts again from the
newest checkpoint as soon as enough hosts answer.
"""

import hashlib
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from polyad.launch.via.connection import LOST, Connection
from polyad.launch.via.hosts import DEFAULT_PORT, MAX_PORT, LaunchError
from polyad.launch.via.preflight import CONNECT_TIMEOUT, check_hosts, look_at
from polyad.launch.via.remote import SILENCE, TERMINATION
from polyad.train.errors import STOP_SIGNALS

LOOK_AGAIN = 5.0
"""Seconds between two looks for hosts that did not answer."""

FORWARDED = (
    "POLYAD_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_",
    "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_", "HF_", "UCX_", "FI_",
)  # fmt: skip
"""Beginnings of the names of variables that hosts get as this command has them."""


class HostsLostError(RuntimeError):
    """Too few hosts are left: one line with those that do not answer."""

    exit_status = 1


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """What is asked of `--via ssh`.

    Raises:
        LaunchError: a value that cannot be used.
    """

    hostfile: Path | None = None
    ssh_config: Path | None = None
    """A file of OpenSSH's client, for users, ports, keys and jumps; None: the user's."""
    port: int = DEFAULT_PORT
    """Where the agents meet, on the first host."""
    wait_minutes: float = 30.0
    """How long hosts that were lost are waited for."""

    def __post_init__(self) -> None:
        if self.hostfile is None:
            raise LaunchError("--hostfile: is missing; --via ssh needs a file of `HOST slots=N`")
        if not 1024 <= self.port <= MAX_PORT:
            raise LaunchError(f"--port: {self.port} is not allowed; 1024 to {MAX_PORT}")
        if self.ssh_config is not None and not self.ssh_config.is_file():
            raise LaunchError(f"--ssh-config: {str(self.ssh_config)!r} is not a file")


@dataclass(frozen=True, kw_only=True)
class SshRun:
    """A run over hosts, as `launch` checked it."""

    hosts: Sequence[str]
    processes_per_node: int
    workplace: str
    """The folder, on every host, that paths of the configuration are relative to."""
    config: Path
    options: SshOptions
    variables: Mapping[str, str]
    """Added to the environment of every agent."""
    agent: Callable[[int, Sequence[str]], list[str]]
    """The words after Python of an agent, of a number of nodes and torchrun's meeting options."""
    sizes: Sequence[int]
    """Numbers of hosts that the layout fits, the largest first."""
    restarts: int
    """How often the run starts again after hosts were lost."""
    needs_interface: bool
    """Whether hosts whose own name is a loopback address cannot exchange anything."""

    @property
    def port(self) -> int:
        """Where the agents meet, on the first host."""
        return self.options.port

    def command(self, host: str) -> list[str]:
        """The words that open a connection; what runs at its end is told through it."""
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

    def task(self, host: str, hosts: Sequence[str]) -> dict[str, Any]:
        """What a host's end of the connection is told to run."""
        first = hosts[0]
        endpoint = f"[{first}]" if ":" in first else first
        digest = hashlib.sha256(f"{self.workplace} {self.config}".encode()).hexdigest()[:12]
        meeting = [
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{endpoint}:{self.port}"),
            *("--rdzv-id", f"polyad-{digest}", "--local-addr", host),
            *("--rdzv-conf", f"is_host={str(host == first).lower()}", "--tee", "2"),
        ]
        return {
            "do": "run",
            "words": self.agent(len(hosts), meeting),
            "variables": dict(self.variables)
            | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: "},
            "processes": self.processes_per_node,
        }


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that this command's environment has for libraries and Polyad."""
    return {name: text for name, text in environment.items() if name.startswith(FORWARDED)}


def check_ssh() -> None:
    """Raises a LaunchError where there is no OpenSSH client."""
    if shutil.which("ssh") is None:
        raise LaunchError("--via: ssh needs OpenSSH's client, which is not on the PATH")


def run_over_ssh(run: SshRun) -> int:
    """Starts a run on its hosts and stays with it.

    Args:
        run: what runs where.

    Returns:
        The exit status: 0; that of the agent which failed first; 128 + the signal.

    Raises:
        LaunchError: a host is not as it has to be; nothing was started.
        HostsLostError: hosts were lost, and too few came back.
    """
    check_hosts(run, list(run.hosts))
    hosts = list(run.hosts)
    for start in range(run.restarts + 1):
        started = _Start(run, hosts)
        ended = started.watch()
        status = next((each for each in ended.values() if each), 0)
        if started.signals:  # nobody wants it to start again
            return 128 + started.signals[0] if status == LOST else status
        lost = _lost_hosts(run, hosts, ended) if status in (1, LOST) else []
        if not lost:
            return status
        _say(f"{_listed(lost)} is lost; the others were ended")
        if start == run.restarts:
            break
        time.sleep(SILENCE + TERMINATION)  # until then it may train on, if it lives
        hosts = _enough_hosts(run)
        _say(f"starts again from the newest checkpoint on {len(hosts)} hosts: {_listed(hosts)}")
    raise HostsLostError(
        f"{_listed(lost)} was lost after {run.restarts} starts again (--max-restarts); the same "
        f"command goes on from the newest checkpoint"
    )


def _lost_hosts(run: SshRun, hosts: Sequence[str], ended: Mapping[str, int]) -> list[str]:
    """Hosts that were lost: agents of others may fail of it before the connection does."""
    if LOST in ended.values():
        return [host for host, status in ended.items() if status == LOST]
    return [host for host, found in look_at(run, hosts).items() if isinstance(found, str)]


def _enough_hosts(run: SshRun) -> list[str]:
    """Waits for as many hosts as the layout fits."""
    until = time.monotonic() + 60 * run.options.wait_minutes
    said: list[str] = []
    while True:
        seen = look_at(run, run.hosts)
        there = [host for host, found in seen.items() if isinstance(found, dict)]
        missing = [host for host in run.hosts if host not in there]
        fitting = next((size for size in run.sizes if size <= len(there)), None)
        if fitting is not None:
            return there[:fitting]
        if time.monotonic() > until:
            raise HostsLostError(
                f"{_listed(missing)} did not answer for {run.options.wait_minutes:g} min "
                f"(--wait-minutes), and the run needs {run.sizes[-1]} hosts; the same command goes "
                f"on from the newest checkpoint"
            )
        if missing != said:
            _say(f"waits for {_listed(missing)}; {run.sizes[-1]} hosts are needed")
            said = missing
        time.sleep(LOOK_AGAIN)


@dataclass
class _Start:
    """The agents of one start, from the first to the last."""

    run: SshRun
    hosts: list[str]
    ended: dict[str, int] = field(default_factory=dict)
    """Statuses, in the order in which the hosts ended."""
    signals: list[int] = field(default_factory=list)
    """Those that the launcher received."""

    def watch(self) -> dict[str, int]:
        """Waits for every agent; a failure of one ends the others.

        Returns:
            The status of each host, in the order in which they ended; `LOST` where the connection
            of the first was lost.
        """
        before = {each: signal.signal(each, self._note) for each in STOP_SIGNALS}
        try:
            self._watch()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.signals:
            return {host: status or 128 + self.signals[0] for host, status in self.ended.items()}
        return self.ended

    def _watch(self) -> None:
        agents = [
            Connection(host, self.run.command(host), self.run.task(host, self.hosts))
            for host in self.hosts
        ]
        handed_on = False
        while len(self.ended) < len(agents):
            if self.signals and not handed_on:
                handed_on = True
                for agent in agents:
                    agent.send(f"signal {self.signals[0]}")
            for agent in agents:
                status = agent.poll()
                if status is not None and agent.host not in self.ended:
                    self._end(agent.host, status, agents)
            time.sleep(0.05)

    def _end(self, host: str, status: int, agents: Sequence[Connection]) -> None:
        first = not any(self.ended.values())
        # The connection of an agent that we ended was cut by us.
        self.ended[host] = status if first or status != LOST else 1
        if status and first and not self.signals:
            what = "its connection was lost" if status == LOST else f"status {status}"
            _say(f"{host} ended first: {what}")
            for agent in agents:
                agent.end()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)


def _listed(hosts: Sequence[str]) -> str:
    return ", ".join(hosts)


def _say(line: str) -> None:
    print(f"polyad: {line}", file=sys.stderr, flush=True)
