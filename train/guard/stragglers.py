"""Processes that all others wait for: named while the run goes on, with their hosts.

Steps take equally long on all processes, since each waits for the slowest in every exchange. So
what a process does alone is timed, every so many steps: a fixed matrix product, and its wait for
data. All are told in the step's one exchange.
"""

from collections.abc import Sequence
from typing import Any

from polyad.parallel.comm import World
from polyad.parallel.probe import product_seconds

SLOW = 1.25
"""Times as long as usual: a process that computes so is named."""
LATE = 0.1
"""A share of a step: a process that waits so much longer for data than usual is named."""
REPEATS = 5


class Stragglers:
    """Looks for slow processes.

    Args:
        every: steps between two looks; 0: none.
        hosts: of all ranks.
        world: this process.
    """

    def __init__(self, every: int, hosts: Sequence[str], world: World) -> None:
        self._every, self._hosts, self._world = every, hosts, world
        self._product = 0.0
        self._named: set[str] = set()

    def look(self, step: int) -> None:
        """Times the product before a step, if it is one to look at."""
        self._product = 0.0
        if self._every and self._world.size > 1 and step % self._every == 0:
            self._product = product_seconds(self._world.device, REPEATS)

    def own(self, data_seconds: float) -> tuple[int, int]:
        """What this process tells the others, in nanoseconds; zeros in other steps.

        Args:
            data_seconds: that it has waited for this step's data.
        """
        if not self._product:
            return 0, 0
        return max(1, round(self._product * 1e9)), round(data_seconds * 1e9)

    def judge(
        self, products: Sequence[int], waits: Sequence[int], step_seconds: float
    ) -> tuple[dict[str, Any], list[str]]:
        """What the times of all say.

        Args:
            products: of each rank, in nanoseconds; zeros in a step without a look.
            waits: for data, of each rank, in nanoseconds.
            step_seconds: of the whole step.

        Returns:
            Values for the step's record: `slowest_rank`, `slowdown` (its product's time over the
            usual one) and `waiting_share` (of the other processes' time, on its account). And a
            line for each process that was not named in the look before.
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
    """The lower quartile: some may be slow."""
    return sorted(values)[round(0.25 * (len(values) - 1))]
