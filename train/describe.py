"""`polyad validate`: describes a run and its cost, from its configuration alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from polyad.model.build import count_parameters
from polyad.model.emoe.layer import EmergentMoEConfig
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig
from polyad.parallel.dims import Dims
from polyad.train.config.adaptation import counts, model_of, unused_parameters
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, load_config
from polyad.train.console import counted, in_bytes
from polyad.train.errors import ConfigError
from polyad.train.plan import footprint
from polyad.train.results import aligned
from polyad.train.start import checkpoint_bytes, plan_run, warm_up_note
from polyad.train.tasks.random_input import flops_of_unit
from polyad.train.tasks.registry import task_class

GRAPH_OPTIONS = ("similarity", "tau", "sigma", "attention_head", "head_mean")
"""Keys of a graph that are shown if they differ from their default."""


def describe_run(
    path: Path, overrides: Sequence[str], world_size: int, *, with_data: bool = True
) -> dict[str, Any]:
    """Checks a run as at startup, and describes it.

    Args:
        path: the configuration.
        overrides: `key=value`.
        world_size: number of processes.
        with_data: whether to read the data folder; otherwise the configuration must set
            `model.vocab_size`, and the run's folder is not checked.

    Returns:
        JSON values from `describe`, the memory of a process, and the step from which the run would
        continue.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    if with_data:
        plan = plan_run(path, overrides, world_size)
        config, dims = plan.config, plan.dims
        epoch = plan.task.samples_per_epoch
        step = plan.resume.training_step if plan.resume else 0
    else:
        config, epoch, step = load_config(path, overrides), None, None
        dims = validate(config, world_size)
        check_without_data(config)
    description = describe(config, dims, samples_per_epoch=epoch)
    # The shapes of teaching feed-forwards are known without it.
    teacher = config.distill.teacher if config.distill.blocks is None else None
    if not with_data and teacher is not None and not Path(teacher).expanduser().exists():
        description["warnings"].append(
            f"distill.teacher: {teacher} does not exist here: the memory does not include it"
        )
        distill = config.distill.model_copy(update={"teacher": None})
        config = config.model_copy(update={"distill": distill})
    return description | {
        "memory_bytes_per_process": memory_per_process(config, dims),
        "goes_on_from_step": step,
    }


def check_without_data(config: RunConfig) -> None:
    """Checks that a configuration sets what the data would determine.

    Raises:
        ConfigError: it does not.
    """
    if missing := config.model.left_to_data():
        raise ConfigError(
            f"{missing}: null takes it from the data; without the data a number is needed, as "
            f"in {missing}={50257 if missing.endswith('vocab_size') else 1000}"
        )


def describe(
    config: RunConfig, dims: Dims, *, samples_per_epoch: int | None = None
) -> dict[str, Any]:
    """Describes a run and its cost.

    Args:
        config: resolved: `model.vocab_size` is a number.
        dims: the layout.
        samples_per_epoch: number of samples in the data; None if unknown.

    Returns:
        JSON values; `description_table` formats them.
    """
    model = model_of(config)
    parameters = count_parameters(model)
    adapted = counts(model)
    train = config.train
    unit = task_class(config.data.kind).unit.name
    units_per_step = train.global_batch_size * config.model.units_per_sample()
    samples = train.steps * train.global_batch_size
    flops = flops_of_unit(config.model, config.data)
    return {
        "run": config.run.folder,
        "unit": unit,
        "model": {
            "kind": config.model.kind,
            "parameters": parameters,
            "active_parameters": parameters - unused_parameters(model),
            "experts": _experts(config),
            "adapted": adapted if adapted.frozen else None,
            "embedding_parameters": _count(model, *config.model.embeddings),
            "block_parameters": [count_parameters(block) for block in _blocks(model)],
            f"flops_per_{unit}": flops,
        },
        "training": {
            "steps": train.steps,
            f"{unit}s_per_step": units_per_step,
            f"{unit}s": train.steps * units_per_step,
            "epochs": samples / samples_per_epoch if samples_per_epoch else None,
            "flops": flops * train.steps * units_per_step,
            "precision": train.precision,
            "optimizer": config.optimizer.kind,
            "schedule": schedule_line(config),
        },
        "warnings": [note] if (note := warm_up_note(config)) else [],
        "layout": degrees_of(config, dims),
        "checkpoint_bytes": checkpoint_bytes(config, model),
    }


def schedule_line(config: RunConfig) -> str:
    """The learning rate over the run, in words."""
    schedule, peak = config.schedule, config.optimizer.learning_rate
    start = f"up to {peak:g} in {schedule.warmup_steps:,} steps" if schedule.warmup_steps else ""
    if schedule.kind == "constant":
        return f"{start}, then constant" if start else f"constant {peak:g}"
    end = schedule.decay_steps or config.train.steps
    fall = f"{schedule.kind} from {peak:g} to {peak * schedule.final_ratio:g} at step {end:,}"
    return f"{start}, {fall}" if start else fall


def degrees_of(config: RunConfig, dims: Dims) -> dict[str, int]:
    """The layout of a run, for a result."""
    train = config.train
    return {
        "processes": dims.world_size,
        "data_parallel_size": dims.data_parallel_size,
        "tensor_parallel_size": dims.tensor_parallel_size,
        "expert_parallel_size": dims.expert_parallel_size,
        "zero_stage": config.parallel.zero_stage,
        "micro_batch_size": train.micro_batch_size,
        "accumulation_steps": dims.accumulation_steps(
            train.global_batch_size, train.micro_batch_size
        ),
    }


def _experts(config: RunConfig) -> dict[str, Any] | None:
    feed_forward = config.model.known_feed_forward()
    if not isinstance(feed_forward, SelectingConfig):
        return None
    layers = range(getattr(config.model, "num_layers", 0))  # a Mixer's sections apply to all
    blocks = config.model.block_feed_forwards() or [feed_forward.of_block(n) for n in layers]
    routed = [block for block, each in enumerate(blocks) if isinstance(each, SelectingConfig)]
    graph = feed_forward
    if isinstance(feed_forward, EmergentMoEConfig):
        graph = SparseMoEConfig()  # without one
    assert isinstance(graph, SparseMoEConfig)
    return {
        "num_experts": feed_forward.num_experts,
        "top_k": feed_forward.used_experts(),
        "final_top_k": graph.final_top_k,
        "score": feed_forward.score,
        "graph": graph.graph,
        "graph_options": {
            name: value
            for name in GRAPH_OPTIONS
            if (value := getattr(graph, name)) != SparseMoEConfig.model_fields[name].default
        },
        "pool": None if graph.pool == "none" else [graph.pool, *graph.pool_bounds()],
        "blocks": routed,
    }


def memory_per_process(config: RunConfig, dims: Dims) -> dict[str, int]:
    """Returns the peak memory of a process on GPUs, as in `polyad plan`.

    Returns:
        Bytes by name, and their `total`; also `snapshot`, the CPU memory of asynchronous
        checkpoints.
    """
    planned = footprint(config, dims)
    memory = planned.memory | {"total": planned.total}
    if config.checkpoint.asynchronous:
        trained = counts(model_of(config)).trained
        numbers = 1 + config.tensors_per_weight()
        memory["snapshot"] = 4 * numbers * trained // dims.world_size
    return memory


def description_table(description: dict[str, Any]) -> str:
    """Formats a description.

    Returns:
        Aligned lines.
    """
    memory = description.get("memory_bytes_per_process")
    rows = [
        ("run", _run_row(description)),
        *_model_rows(description["model"], description["unit"]),
        *_training_rows(description["training"], description["unit"]),
        ("layout", _layout_row(description["layout"])),
        *([("memory", _memory_row(memory))] if memory else []),
        ("checkpoint", in_bytes(description["checkpoint_bytes"])),
        *(("warning", line) for line in description["warnings"]),
    ]
    return "\n".join(aligned(rows, "<"))


def _run_row(description: dict[str, Any]) -> str:
    step = description.get("goes_on_from_step")
    state = {None: "data and run folder not checked", 0: "a new run"}.get(
        step, f"continues from step {step}"
    )
    return f"{description['run']}  ({state})"


def _model_rows(model: dict[str, Any], unit: str) -> list[tuple[str, str]]:
    blocks = model["block_parameters"]
    block = ""
    if blocks:
        low, high = min(blocks), max(blocks)
        block = f", {low:,} per block" if low == high else f", {low:,} to {high:,} per block"
    return [
        ("model", model["kind"] + (f", {counted(len(blocks), 'block')}" if blocks else "")),
        (
            "parameters",
            f"{model['parameters']:,}  (embeddings {model['embedding_parameters']:,}{block})",
        ),
        *([("adapted", model["adapted"].in_words())] if model["adapted"] else []),
        *_expert_rows(model),
        (f"FLOPs/{unit}", f"{model[f'flops_per_{unit}']:.3g}  (forward and backward)"),
    ]


def _expert_rows(model: dict[str, Any]) -> list[tuple[str, str]]:
    experts = model["experts"]
    if experts is None:
        return []
    graph = "no graph" if experts["graph"] == "none" else f"{experts['graph']} graph"
    if options := experts["graph_options"]:
        words = (v if n == "similarity" else f"{n} {v}" for n, v in options.items())
        graph += f" ({', '.join(words)})"
    if experts["pool"]:
        name, least, most = experts["pool"]
        graph += f"; in training from a pool of {least} to {most} experts per {name}"
    chosen = f"{experts['top_k']}"
    if experts["final_top_k"] is not None:
        chosen += f", growing to {experts['final_top_k']},"
    return [
        ("active", f"{model['active_parameters']:,} parameters per token"),
        (
            "experts",
            f"{experts['num_experts']} in each of {counted(len(experts['blocks']), 'block')}, "
            f"{chosen} active per token; {experts['score']} score, {graph}",
        ),
    ]


def _training_rows(training: dict[str, Any], unit: str) -> list[tuple[str, str]]:
    epochs = training["epochs"]
    seen = f", {epochs:,.2f} epochs of the data" if epochs is not None else ""
    return [
        ("steps", f"{training['steps']:,} of {training[f'{unit}s_per_step']:,} {unit}s"),
        (f"{unit}s", f"{training[f'{unit}s']:,}{seen}"),
        ("FLOPs", f"{training['flops']:.3g}"),
        ("optimizer", f"{training['optimizer']}, {training['precision']}"),
        ("learning rate", training["schedule"]),
    ]


def _layout_row(layout: dict[str, Any]) -> str:
    tensor, expert = (
        f"{kind} parallel {layout[f'{kind}_parallel_size']}, "
        if layout[f"{kind}_parallel_size"] > 1
        else ""
        for kind in ("tensor", "expert")
    )
    return (
        f"{counted(layout['processes'], 'process')}: data parallel "
        f"{layout['data_parallel_size']}, {tensor}{expert}ZeRO {layout['zero_stage']}; "
        f"{counted(layout['accumulation_steps'], 'micro-batch')} of {layout['micro_batch_size']} "
        "per step and process"
    )


def _memory_row(memory: dict[str, int]) -> str:
    parts = ", ".join(
        f"{name} {in_bytes(size)}"
        for name, size in memory.items()
        if name not in {"total", "snapshot"}
    )
    row = f"about {in_bytes(memory['total'])} per process when run on GPUs  ({parts})"
    if "snapshot" in memory:
        row += f"; {in_bytes(memory['snapshot'])} of host memory for asynchronous checkpoints"
    return row


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    blocks = getattr(model, "blocks", None)
    return iter(()) if blocks is None else blocks.children()


def _count(model: nn.Module, *prefixes: str) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if name.startswith(prefixes))
