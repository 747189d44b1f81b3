"""`layer.py --expert-parallel P`: one sparse layer whose experts P processes share.

Every process of this machine has tokens of its own and E / P of the experts, as under expert
parallelism, and one thread unless told otherwise. Torchrun starts them:

    python -m tests.benchmarks.expert_parallel '{"result": FILE, "processes": 2, ...}'
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from polyad.launch.agent import STANDALONE
from polyad.launch.ending import guard
from polyad.launch.machine import end_with_launcher, is_main, prepare_environment
from polyad.train.errors import ConfigError, RunError
from tests.benchmarks import environment


def bench_expert_parallel(processes: int, **arguments: Any) -> dict[str, Any]:
    """Times one layer in several processes at once.

    Args:
        processes: P.
        arguments: of `bench_smoe`.

    Returns:
        As `bench_smoe`: a run takes as long as the process that takes longest, rows are of all
        processes together, bytes are of rank 0.

    Raises:
        ConfigError: the experts cannot be shared so, or there are fewer GPUs.
        RunError: a process failed; it has said why.
    """
    from tests.benchmarks.smoe import GOAL_SHAPE, check_shape

    shape = GOAL_SHAPE | arguments  # the defaults of bench_smoe
    experts = shape["experts"]
    check_shape(shape["tokens"], experts, shape["top_k"])
    if experts % processes:
        raise ConfigError(f"--experts: {experts} is not divisible by --expert-parallel {processes}")
    if arguments.get("device") == "cuda":
        import torch

        if torch.cuda.device_count() < processes:
            raise ConfigError(
                f"--expert-parallel: {processes} is more than the {torch.cuda.device_count()} CUDA "
                "devices that are here"
            )
    threads = arguments.get("threads", 1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        order = arguments | {"processes": processes, "threads": threads, "result": str(file)}
        command = [
            *(sys.executable, "-m", "polyad.launch.torchrun", *STANDALONE),
            *("--nproc-per-node", str(processes)),
            *("-m", "tests.benchmarks.expert_parallel", json.dumps(order)),
        ]
        threaded = environment() | {"OMP_NUM_THREADS": str(threads)}
        status = subprocess.run(command, env=threaded, check=False).returncode
        if status:
            raise RunError(f"a process of --expert-parallel {processes} failed")
        result: dict[str, Any] = json.loads(file.read_text())
    return result


def _work() -> int:
    order = json.loads(sys.argv[1])
    from polyad.parallel import comm
    from tests.benchmarks.smoe import bench_smoe

    file = Path(order.pop("result"))
    world = comm.initialize(expert_parallel_size=order.pop("processes"))
    for name in ("precisions", "loads"):
        if name in order:
            order[name] = tuple(order[name])
    if not is_main():
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    result = bench_smoe(**order, world=world)
    if is_main():
        file.write_text(json.dumps(result))
    comm.shutdown()
    return 0


def main() -> None:
    """Runs in each process of torchrun; the only argument is the JSON of the module's docstring."""
    end_with_launcher()
    prepare_environment()
    status = guard(_work)
    from polyad.parallel import comm

    comm.leave(status)


if __name__ == "__main__":
    main()
