"""How often to save, and what failures cost: Young's and Daly's interval."""

from math import sqrt
from typing import NamedTuple

HOURS_OF_ONE = 50_000.0
"""Between two failures of one GPU with its share of a node. Llama 3's run had 419 unexpected
interruptions in 54 days on 16,384 (Dubey et al. 2024, section 3.3.4): one in 50,700 hours."""
RESTART_SECONDS = 300.0
"""Until a run that has failed trains again: a new start, and reading a checkpoint."""


class Saving(NamedTuple):
    """How often a run saves, and what that and failures cost."""

    interval: float
    """Seconds between checkpoints."""
    stall: float
    """Seconds that training stands still for one."""
    failure_every: float
    """Seconds between failures of some process."""
    lost_share: float
    """Of the time, that goes to stalls, to steps done twice and to new starts."""


def lost_share(interval: float, stall: float, failure_every: float, restart: float) -> float:
    """The share of the time that is lost: stalls, half an interval at each failure, new starts."""
    return stall / interval + (interval / 2 + stall + restart) / failure_every


def best_saving(
    stall: float,
    processes: int,
    hours_of_one: float = HOURS_OF_ONE,
    restart: float = RESTART_SECONDS,
) -> Saving:
    """The interval with the least loss: sqrt(2 s M) - s, for stalls of s and failures every M.

    Source: Young 1974 without the second term; Daly 2006, equation 11.

    Args:
        stall: Seconds that training stands still for a checkpoint.
        processes: Of the run; one failure ends all.
        hours_of_one: Between two failures of one of them.
        restart: Seconds until a run that has failed trains again.
    """
    every = 3600 * hours_of_one / processes
    interval = max(sqrt(2 * stall * every) - stall, stall, 1.0)
    return saving(interval, stall, processes, hours_of_one, restart)


def saving(
    interval: float,
    stall: float,
    processes: int,
    hours_of_one: float = HOURS_OF_ONE,
    restart: float = RESTART_SECONDS,
) -> Saving:
    """What a given interval costs; see `best_saving`."""
    every = 3600 * hours_of_one / processes
    return Saving(interval, stall, every, lost_share(interval, stall, every, restart))
