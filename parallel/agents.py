"""Changes to the behaviour of torchrun's agent, called in the agent's process."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api

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
