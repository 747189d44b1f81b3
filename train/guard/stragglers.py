"""Stragglers: reports processes that all others wait for, with their hosts, during a run.

Steps take equally long on all processes, since every collective waits for the slowest. So every few
steps work is timed that a process does alone: a fixed matrix product, and its wait for data. The
times are exchanged in the step's all-reduce.
"""

from collections.abc import Sequence
from typing import Any

from polyad.parallel.comm import World
from polyad.parallel.probe import product_seconds

SLOW = 1.25
"""A process is reported if its product takes this many times as long as usual."""
LATE = 0.1
"""A process is reported if it waits longer for data than usual by this share of a step."""
REPEATS = 5


class Stragglers:
    """Detects slow processes.

    Args:
        every: number of steps between checks; 0: no checks.
        hosts: the hosts of all ranks.
        world: this process.
    """

    def __init__(self, every: int, hosts: Sequence[str], world: World) -> None:
        self._every, self._hosts, self._world = every, hosts, world
        self._product = 0.0
        self._named: set[str] = set()

    def look(self, step: int) -> None:
        """Times the product before a step, if a check is due."""
        self._product = 0.0
        if self._every and self._world.size > 1 and step % self._every == 0:
            self._product = product_seconds(self._world.device, REPEATS)

    def own(self, data_seconds: float) -> tuple[int, int]:
        """Returns this process's times to exchange, in nanoseconds; zeros in steps without a check.

        Args:
            data_seconds: time that it has waited for this step's data.
        """
        if not self._product:
            return 0, 0
        return max(1, round(self._product * 1e9)), round(data_seconds * 1e9)

    def judge(
        self, products: Sequence[int], waits: Sequence[int], step_seconds: float
    ) -> tuple[dict[str, Any], list[str]]:
        """Evaluates the times of all processes.

        Args:
            products: time of the product on each rank, in nanoseconds; zeros in a step without a
                check.
            waits: wait for data on each rank, in nanoseconds.
            step_seconds: duration of the whole step.

        Returns:
            Values for the step's record: `slowest_rank`, `slowdown` (its product's time over the
            usual one) and `waiting_share` (share of the other processes' time that they wait for
            it). And a line for each process that was not reported in the previous check.
        """
        if not any(products):
            return {}, []
        usual, usual_wait = _usual(products), _usual(waits)
        slowest = max(range(len(products)), key=products.__getitem__)
        slowdown = products[slowest] / usual
        record = {
            "slowest_rank": slowest,
            "slowdown": slowdown,
            "waiting_share": max(0.0, 1 - 1 / slowdown),
        }
        named = {}
        for rank, (product, wait) in enumerate(zip(products, waits, strict=True)):
            place = f"process {rank} on {self._hosts[rank]}"
            late = (wait - usual_wait) / 1e9
            if product > SLOW * usual:
                named[place] = f"{place} takes {product / usual:.1f} times as long as others"
            elif late > LATE * step_seconds:
                named[place] = f"{place} waits {late:.2f} s longer for data per step than others"
        new = [line for name, line in named.items() if name not in self._named]
        self._named = set(named)
        return record, [f"{line}, which wait for it" for line in new]


def _usual(values: Sequence[int]) -> float:
    """The lower quartile, since some processes may be slow."""
    return sorted(values)[round(0.25 * (len(values) - 1))]
