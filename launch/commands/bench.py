"""`polyad bench`: what a step of a configuration takes here."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyad.launch.command import (
    ConfigFile,
    Json,
    Overrides,
    Positive,
    check_json_path,
    command,
    results,
)
from polyad.launch.processes import bind_to_cores, end_with_launcher, processor_name

if TYPE_CHECKING:
    from polyad.train.config.run import RunConfig


@command(
    "bench",
    "polyad bench configs/quickstart/gpt2.yaml model.vocab_size=8192",
    "polyad bench configs/quickstart/gpt2-smoe.yaml --processes 2 --forced-balance "
    "model.vocab_size=8192",
    "polyad bench configs/gpt2/124m-smoe-16.yaml --processes 2 --json bench.json "
    "parallel.expert_parallel_size=2 model.vocab_size=50257",
)
def bench(
    config: ConfigFile,
    overrides: Overrides,
    *,
    steps: Positive = 10,
    forced_balance: bool = False,
    processes: Positive | None = None,
    json: Json = None,
) -> None:
    """Times training steps: throughput, memory, MFU. Needs no data.

    MFU (model FLOPs utilization) is the share of the GPU's peak FLOP rate that the model uses.

    Args:
        steps: number of timed steps, after 2 warm-up steps; default 10.
        forced_balance: assign tokens to experts in turn, whatever their scores, so that all experts
            have equal load, as in a model whose training has balanced them.
        processes (P): number of processes on this machine; default: those that torchrun has
            started, or 1.
    """
    from polyad.launch.commands.plan import configuration
    from polyad.launch.torchrun import become_processes
    from polyad.model.build import build_model
    from polyad.parallel.comm import environment_world_size
    from polyad.train.bench import force_equal_loads
    from polyad.train.errors import ConfigError

    check_json_path(json)
    started = environment_world_size()
    if processes is not None and started > 1 and processes != started:
        raise ConfigError(
            f"--processes: {processes} is not allowed, {started} processes were started"
        )
    number = processes or started
    settings = configuration(config, overrides, number)
    if forced_balance:
        force_equal_loads(build_model(settings.model))
    if number > started:
        become_processes(number)
    end_with_launcher()
    bind_to_cores()
    with results(json) as show:
        result = _measured(settings, config, overrides, steps, balanced=forced_balance)
        if result is not None:
            show(result, _table(result))


def _measured(
    config: "RunConfig", path: Path, overrides: Sequence[str], steps: int, *, balanced: bool
) -> dict[str, Any] | None:
    """JSON values on rank 0; None on the other processes."""
    import torch

    from polyad.model.build import build_model, count_parameters
    from polyad.parallel import comm
    from polyad.train.bench import BEFORE, time_steps
    from polyad.train.config.environment import agreed_facts
    from polyad.train.tasks.registry import TASKS

    degrees, train = config.parallel, config.train
    world = comm.initialize(
        degrees.timeout_minutes,
        degrees.tensor_parallel_size,
        degrees.expert_parallel_size,
        agreed_facts(config, None),
    )
    on_gpu = world.device.type == "cuda"
    measured = time_steps(config, world, steps, balanced=balanced)
    comm.shutdown()
    if not world.is_main:
        return None
    return {
        "config": path.name,
        "overrides": list(overrides),
        "unit": TASKS[config.data.kind].unit.name,
        "parameters": count_parameters(build_model(config.model)),
        "precision": train.precision,
        "processes": world.size,
        "data_parallel_size": world.data_parallel_size,
        "tensor_parallel_size": degrees.tensor_parallel_size,
        "expert_parallel_size": degrees.expert_parallel_size,
        "zero_stage": degrees.zero_stage,
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "device": torch.cuda.get_device_name() if on_gpu else processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "compile": config.model.compile,
        "forced_balance": balanced,
        "steps": steps,
        "steps_before": BEFORE,
        **measured,
    }


def _table(result: dict[str, Any]) -> str:
    """The result for a person."""
    from polyad.train.results import aligned, counted, in_bytes

    processes = counted(result["processes"], "process")
    lines = [
        f"{result['config']}: {result['parameters']:,} parameters in {result['precision']}, "
        f"{result['global_batch_size']} samples per step in micro-batches of "
        f"{result['micro_batch_size']}",
        f"{processes} (data parallel {result['data_parallel_size']}, tensor parallel "
        f"{result['tensor_parallel_size']}, expert parallel {result['expert_parallel_size']}, "
        f"ZeRO {result['zero_stage']}), {result['threads']} threads of {result['device']}",
    ]
    if result["forced_balance"]:
        lines.append(
            "expert loads are forced to be equal, so this does not measure the router's own balance"
        )
    way = "compiled" if result["compile"] else "eager"
    speed, memory = f"{result['units_per_second']:,.0f}", in_bytes(result["peak_memory_bytes"])
    mfu = "-" if result["mfu"] is None else f"{result['mfu']:.1%}"
    rows = [
        ("", "s per step", f"{result['unit']}s/s", "peak memory", "MFU"),
        (way, f"{result['seconds']:.4f}", speed, memory, mfu),
    ]
    lines += aligned(rows)
    return "\n".join(lines)
