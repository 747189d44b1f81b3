"""One of the processes whose steps `polyad bench scaling` times.

    python -m polyad.launch.bench.scaling_process '{"address": SOCKET, "configs": {...}}'

Torchrun starts as many as there are in one variant. Each connects to the bench, builds a model for
each configuration, and then does the steps that it is asked for, until the bench hangs up. Between
them it waits on its socket and takes nothing from the processes of other variants.
"""

import json
import sys
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from polyad.launch.bench.scaling_step import Training
from polyad.launch.ending import guard
from polyad.launch.machine import bind_to_cores, end_with_launcher, prepare_environment
from polyad.parallel import comm
from polyad.train.config.run import RunConfig, load_config
from polyad.train.errors import RunError
from polyad.train.guard.memory import is_out_of_memory


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
