"""What torchrun's agent, in whose process this is called, does otherwise than torch has it."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

from polyad.parallel.addresses import listener

TELLS_WITHIN = 3.0
"""Seconds in which a launcher that starts no agent tries to reach the others' store."""
STARTS_WITHIN = 20.0
"""Seconds in which a host that was started together with this one listens."""
BAD_INPUT = 2
"""The exit status of a process that would find the same if it was started again."""


@dataclass
class Workers:
    """What the agent has seen of its workers."""

    started: bool = False
    bad_input: bool = False
    """Whether one has ended with the status of bad input."""


def watch_workers() -> Workers:
    """Makes the agent start its workers again after failures, but not after bad input.

    Before that it ends them within its own time: torch takes that only where the agent ends too, so
    that the others would wait 30 seconds for a worker that is frozen.
    """
    seen = Workers()
    monitor, stop = LocalElasticAgent._monitor_workers, LocalElasticAgent._stop_workers

    def monitored(agent: Any, group: Any) -> Any:
        result = monitor(agent, group)
        seen.started = True
        if any(failure.exitcode == BAD_INPUT for failure in result.failures.values()):
            seen.bad_input, agent._remaining_restarts = True, 0
        return result

    def stopped(agent: Any, group: Any) -> None:
        if hasattr(agent, "_shutdown_timeout"):
            agent._shutdown(timeout=agent._shutdown_timeout)
        else:  # in older versions of PyTorch an agent knows no time of its own
            stop(agent, group)

    LocalElasticAgent._monitor_workers = monitored  # type: ignore[method-assign]
    LocalElasticAgent._stop_workers = stopped  # type: ignore[method-assign]
    return seen


def meet_other_agents(run: str, workers: Workers) -> None:
    """Makes the store where agents meet listen on one address, if it is in this process.

    Until the workers start, word of a launcher that starts no agent ends this one: the others would
    wait for it.

    Args:
        run: the rendezvous' id.
        workers: of this agent.
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
        except RuntimeError:  # the agent itself says that the store is gone
            return
        time.sleep(0.5)


def tell_agents(host: str, port: int, run: str, line: str) -> None:
    """Tells the agents of other hosts that this host starts none.

    Args:
        host: where the agents meet.
        port: there.
        run: the rendezvous' id.
        line: why.
    """
    patience = timedelta(seconds=TELLS_WITHIN)
    with suppress(OSError, RuntimeError):  # nobody waits there
        _until_it_listens(host, port)
        store = TCPStore(host, port, None, False, timeout=patience, wait_for_workers=False)
        store.set(_word_of(run), json.dumps({"host": socket.gethostname(), "line": line}))


def _until_it_listens(host: str, port: int) -> None:
    """Waits for a host that answers: its launcher may still be starting its agent."""
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
