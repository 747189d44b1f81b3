"""Changes to the behaviour of torchrun's agent, called in the agent's process."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

from polyad.parallel.addresses import listener

TELLS_WITHIN = 3.0
"""Seconds for which a launcher that starts no agent tries to reach the others' store."""
STARTS_WITHIN = 20.0
"""Seconds within which a host that was started together with this one is expected to listen."""
BAD_INPUT = 2
"""The exit status of a process for which a restart would not help."""


@dataclass
class Workers:
    """What the agent has observed of its workers."""

    started: bool = False
    running: bool = False
    """Whether there are workers, or they are being started or stopped."""
    signal: int = 0
    """The first signal that the agent got while there were workers, or 0."""
    bad_input: bool = False
    """Whether one has exited with the status for bad input."""


def watch_workers(end: Callable[[int], Any], is_stop: Callable[[int], bool]) -> Workers:
    """Makes the agent restart its workers after failures, but not after bad input or a signal.

    torch's handler raises wherever the agent is, also where an import or a library swallows it.
    Here a signal is noted while there are workers, and read between two looks at them. Only the
    first one is forwarded: at the next, torch would abandon workers that save.

    Before a restart the agent also ends its workers within its own timeout: torch applies that only
    if the agent ends too, so that the others would wait 30 seconds for a frozen worker.

    Args:
        end: ends this process, given a signal that comes while there are no workers.
        is_stop: whether an exit status of a worker says that a signal stopped it.
    """
    seen = Workers()
    start, monitor, stop = (
        LocalElasticAgent._start_workers,
        LocalElasticAgent._monitor_workers,
        LocalElasticAgent._stop_workers,
    )

    def note(number: int, frame: FrameType | None) -> None:
        if not seen.running:
            end(number)
        seen.signal = seen.signal or number

    def read_signal() -> None:
        if seen.signal:
            number = signal.Signals(seen.signal)
            raise api.SignalException(f"got {number.name}", sigval=number)

    def started(agent: Any, group: Any) -> Any:
        seen.running = True  # a signal from here on is read below
        return start(agent, group)

    def monitored(agent: Any, group: Any) -> Any:
        result = monitor(agent, group)
        seen.started = True
        seen.running = result.state == WorkerState.HEALTHY
        if result.state != WorkerState.SUCCEEDED:
            read_signal()
        statuses = [failure.exitcode for failure in result.failures.values()]
        seen.bad_input = seen.bad_input or BAD_INPUT in statuses
        if BAD_INPUT in statuses or any(map(is_stop, statuses)):
            agent._remaining_restarts = 0
        return result

    def stopped(agent: Any, group: Any) -> None:
        if hasattr(agent, "_shutdown_timeout"):
            agent._shutdown(timeout=agent._shutdown_timeout)
        else:  # in older versions of PyTorch an agent has no timeout
            stop(agent, group)
        seen.running = False
        read_signal()

    LocalElasticAgent._start_workers = started  # type: ignore[method-assign]
    LocalElasticAgent._monitor_workers = monitored  # type: ignore[method-assign]
    LocalElasticAgent._stop_workers = stopped  # type: ignore[method-assign]
    api._terminate_process_handler = note  # type: ignore[assignment]
    return seen


def meet_other_agents(run: str, workers: Workers) -> None:
    """Makes the rendezvous store listen on one address, if it is in this process.

    Until the workers start, a message from a launcher that starts no agent ends this agent:
    otherwise the others would wait for it.

    Args:
        run: the id of the rendezvous.
        workers: the workers of this agent.
    """

    def bound(host: str, port: int, **options: Any) -> TCPStore:
        if options.get("is_master") and (listening := listener(host, port)) is not None:
            options |= {"master_listen_fd": listening.detach(), "multi_tenant": False}
        store = TCPStore(host, port, **options)
        threading.Thread(target=_hear, args=(store, run, workers), daemon=True).start()
        return store

    c10d_rendezvous_backend.TCPStore = bound  # type: ignore[assignment,attr-defined]


def _hear(store: TCPStore, run: str, workers: Workers) -> None:
    while not workers.started:
        try:
            if store.check([_word_of(run)]):
                word = json.loads(store.get(_word_of(run)))
                print(f"polyad: error: {word['host']} does not start: {word['line']}",
                      file=sys.stderr, flush=True)  # fmt: skip
                os._exit(BAD_INPUT)
        except RuntimeError:  # the agent itself reports that the store is gone
            return
        time.sleep(0.5)


def tell_agents(host: str, port: int, run: str, line: str) -> None:
    """Tells the agents of other hosts that this host starts none.

    Args:
        host: the host of the rendezvous.
        port: its port.
        run: the id of the rendezvous.
        line: the reason.
    """
    patience = timedelta(seconds=TELLS_WITHIN)
    with suppress(OSError, RuntimeError):  # nobody is waiting there
        _until_it_listens(host, port)
        store = TCPStore(host, port, None, False, timeout=patience, wait_for_workers=False)
        store.set(_word_of(run), json.dumps({"host": socket.gethostname(), "line": line}))


def _until_it_listens(host: str, port: int) -> None:
    """Waits until a host answers: its launcher may still be starting its agent."""
    until = time.monotonic() + STARTS_WITHIN
    while True:
        try:
            socket.create_connection((host, port), timeout=TELLS_WITHIN).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _word_of(run: str) -> str:
    return f"polyad/{run}/word"
