"""`polyad launch --via ssh`: a torchrun agent on each host of a hostfile, through OpenSSH.

The launcher checks every host first, starts the agents, forwards signals, and shows their output
with the host's name. When a host is lost, it ends the others and restarts from the newest
checkpoint as soon as enough hosts answer.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from polyad.launch.output import pass_on
from polyad.launch.via.remote import AGENT_KILLED, BEAT, SILENCE, TERMINATION, Look
from polyad.launch.via.ssh_hosts import SshRun, check_hosts, look_at
from polyad.train.errors import STOP_SIGNALS

LOST = 255
"""ssh's own exit status: the connection failed or broke."""
LOOK_AGAIN = 5.0
"""Seconds between attempts to reach lost hosts."""


class HostsLostError(RuntimeError):
    """Too few hosts are left: one line with those that do not answer."""

    exit_status = 1


class Connection:
    """A host's agent; its output is prefixed with the host's name.

    Args:
        host: the host's name.
        command: opens the connection.
        task: the task for `polyad.launch.via.remote`.
    """

    def __init__(self, host: str, command: Sequence[str], task: Mapping[str, object]) -> None:
        self.host = host
        # Its own session: Ctrl-C in a terminal is forwarded through the connection.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._sending = threading.Lock()
        self._ending: float | None = None
        self.send(json.dumps(task))
        self._threads = [
            threading.Thread(target=pass_on, args=(self._process.stdout, sys.stdout, "")),
            threading.Thread(target=pass_on, args=(self._process.stderr, sys.stderr, f"{host} ")),
            threading.Thread(target=self._beat, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, line: str) -> None:
        """Sends a line; it is dropped if the connection is closed."""
        with self._sending, contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Ends the agent cleanly if the host answers, else the connection."""
        if self._ending is None:
            self._ending = time.monotonic()
            # In a thread: the pipe to an unreachable host may be full.
            threading.Thread(target=self.send, args=("end",), daemon=True).start()

    def poll(self) -> int | None:
        """The agent's status, once all of its output was shown; None while it runs."""
        if self._ending is not None and time.monotonic() - self._ending > 3 * TERMINATION:
            self._process.kill()
        if self._process.poll() is None:
            return None
        for thread in self._threads[:2]:
            thread.join(timeout=5)
        status = self._process.returncode
        return LOST if status < 0 else status

    def _beat(self) -> None:
        while self._process.poll() is None:
            self.send("beat")
            time.sleep(BEAT)


def run_over_ssh(run: SshRun) -> int:
    """Starts a run on its hosts and supervises it.

    Args:
        run: the run and its hosts.

    Returns:
        The exit status: 0; that of the agent which failed first; 128 + the signal.

    Raises:
        LaunchError: a host does not meet the requirements; nothing was started.
        HostsLostError: hosts were lost, and too few came back.
    """
    check_hosts(run, list(run.hosts))
    hosts = list(run.hosts[: run.sizes[0]])
    for start in range(run.restarts + 1):
        started = _Start(run, hosts)
        ended = started.watch()
        status = next((each for each in ended.values() if each), 0)
        if started.signals:  # stopped by the user: no restart
            return 128 + started.signals[0] if status == LOST else status
        lost = _lost_hosts(run, hosts, ended) if status in (1, LOST, AGENT_KILLED) else []
        if not lost:
            return status
        _say(f"lost {_listed(lost)}; the other hosts were stopped")
        if start == run.restarts:
            break
        _wait_for_end(run, lost)
        hosts = _enough_hosts(run)
        _say(f"restarting from the newest checkpoint on {len(hosts)} hosts: {_listed(hosts)}")
    raise HostsLostError(
        f"{_listed(lost)} was lost after {run.restarts} restarts (--max-restarts); run the same "
        "command again to continue from the newest checkpoint"
    )


def _lost_hosts(run: SshRun, hosts: Sequence[str], ended: Mapping[str, int]) -> list[str]:
    """Finds lost hosts, since agents of others may fail before the connection to a lost one
    does."""
    told = [host for host, status in ended.items() if status in (LOST, AGENT_KILLED)]
    if told:
        return told
    return [host for host, found in look_at(run, hosts).items() if isinstance(found, str)]


def _wait_for_end(run: SshRun, lost: Sequence[str]) -> None:
    """Waits until lost hosts run nothing of this run any more, since they might still train.

    A host that answers reports it; one that does not has ended its agent after `SILENCE`.
    """
    until = time.monotonic() + SILENCE + TERMINATION
    while (left := until - time.monotonic()) > 0:
        looks = look_at(run, lost).values()
        if all(isinstance(look, Look) and run.name not in look.agents for look in looks):
            return
        time.sleep(min(left, LOOK_AGAIN))


def _enough_hosts(run: SshRun) -> list[str]:
    """Waits for enough hosts for the layout."""
    until = time.monotonic() + 60 * run.options.wait_minutes
    said: list[str] = []
    while True:
        seen = look_at(run, run.hosts)
        there = [host for host, found in seen.items() if not isinstance(found, str)]
        missing = [host for host in run.hosts if host not in there]
        fitting = next((size for size in run.sizes if size <= len(there)), None)
        if fitting is not None:
            return there[:fitting]
        if time.monotonic() > until:
            raise HostsLostError(
                f"{_listed(missing)} did not answer for {run.options.wait_minutes:g} min "
                f"(--wait-minutes), and the run needs {run.sizes[-1]} hosts; run the same command "
                "again to continue from the newest checkpoint"
            )
        if missing != said:
            _say(f"waiting for {_listed(missing)}; {run.sizes[-1]} hosts are needed")
            said = missing
        time.sleep(LOOK_AGAIN)


@dataclass
class _Start:
    """The agents of one start of the run."""

    run: SshRun
    hosts: list[str]
    ended: dict[str, int] = field(default_factory=dict)
    """Statuses, in the order in which the hosts ended."""
    signals: list[int] = field(default_factory=list)
    """The signals that the launcher received."""

    def watch(self) -> dict[str, int]:
        """Waits for every agent; if one fails, the others are ended.

        Returns:
            The status of each host, in the order in which they ended; `LOST` if the first to end
            lost its connection.
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
        # We closed the connection of an agent that we ended.
        self.ended[host] = status if first or status != LOST else 1
        if status and first and not self.signals:
            killed = "its torchrun was killed" if status == AGENT_KILLED else f"status {status}"
            what = "its connection was lost" if status == LOST else killed
            _say(f"{host} ended first: {what}")
            for agent in agents:
                agent.end()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)


def _listed(hosts: Sequence[str]) -> str:
    return ", ".join(hosts)


def _say(line: str) -> None:
    print(f"polyad: {line}", file=sys.stderr, flush=True)
