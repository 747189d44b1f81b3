"""One of the processes whose steps `scaling.py` times.

    python -m tests.benchmarks.scaling_process '{"address": SOCKET, "configs": {...}}'

Torchrun starts as many as there are in one variant. Each connects to the bench, builds a model for
each configuration, and then does the steps that it is asked for, until the bench hangs up. Between
them it waits on its socket and takes nothing from the processes of other variants.
"""

import json
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NamedTuple

from polyad.launch.ending import guard
from polyad.launch.machine import bind_to_cores, end_with_launcher, prepare_environment
from polyad.parallel import comm
from polyad.parallel.plan.traffic import Exchanges
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, load_config
from polyad.train.errors import RunError
from polyad.train.forecast.measured import RandomTraining
from polyad.train.guard.memory import is_out_of_memory
from tests.benchmarks.turns import synchronize
from tests.benchmarks.waiting import Step, Waiting


class Measured(NamedTuple):
    """What a process tells of the steps that it was asked for."""

    began: float
    """On the clock that all processes share, and so the next one."""
    ended: float
    watched: Step
    """One more step, in which its collectives were noted."""
    exchanges: Exchanges
    """Collectives of that step."""


class Training(RandomTraining):
    """A configuration in training on random samples, some of whose steps are watched.

    Args:
        config: Resolved.
        world: This process.
    """

    def __init__(self, config: RunConfig, world: comm.World) -> None:
        super().__init__(config, world)
        self._here, self._dims = world, validate(config, world.size)

    def measured(self, steps: int) -> Measured:
        """Does so many steps, and one more; all processes call it together."""
        began = self._start()
        list(self.steps(steps))
        ended = self._now()
        watch = Waiting(self._dims, self._here.rank, self._here.device)
        watched_from = self._start()
        with watch:
            list(self.steps(1))
        step = Step(watched_from, self._now(), watch.calls())
        return Measured(began, ended, step, watch.traffic.exchanges)

    def _start(self) -> float:
        comm.barrier()
        return self._now()

    def _now(self) -> float:
        synchronize(self._here.device)
        return time.monotonic()  # all processes of a machine have one


def serve(address: str, configs: dict[str, RunConfig]) -> None:
    """Does what the bench asks for until it hangs up.

    Args:
        address: Of its socket.
        configs: By the name that it asks with; their degrees are the same.
    """
    with Client(address, "AF_UNIX") as bench:
        bench.send((comm.environment_world_size(), comm.environment_rank()))
        degrees = next(iter(configs.values())).parallel
        world = comm.initialize(
            degrees.timeout_minutes, degrees.tensor_parallel_size, degrees.expert_parallel_size
        )
        trainings = {name: Training(config, world) for name, config in configs.items()}
        bench.send("ready")
        while True:
            try:
                name, steps = bench.recv()
            except EOFError:
                return
            bench.send(trainings[name].measured(steps))


def _work() -> int:
    order: dict[str, Any] = json.loads(sys.argv[1])
    configs = {name: load_config(Path(path)) for name, path in order["configs"].items()}
    try:
        serve(order["address"], configs)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(
            "out of memory; lower train.micro_batch_size, or give one number after --processes"
        ) from None
    return 0


def main() -> None:
    """Runs in each process of torchrun; the only argument is the JSON of the module's docstring."""
    end_with_launcher()
    prepare_environment()
    bind_to_cores()
    comm.leave(guard(_work))


if __name__ == "__main__":
    main()
