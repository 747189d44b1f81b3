"""Describes a run and its cost (`polyad validate`), and a folder of weights (`polyad inspect`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyad.model.build import build_model, count_parameters
from polyad.model.families.family import OUR_NAMES
from polyad.model.families.keys import WeightsError
from polyad.model.families.registry import family_of_model
from polyad.model.smoe.config import SelectingConfig
from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel.config import Dims
from polyad.parallel.families import FamilyWeights
from polyad.parallel.foreign import TheirWeights
from polyad.parallel.weights import open_weights
from polyad.train.config.adaptation import model_of, trained_parameters, unused_parameters
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, load_config
from polyad.train.errors import ConfigError, some_of
from polyad.train.plan import flops_per_step, footprint
from polyad.train.results import aligned, counted, in_bytes
from polyad.train.start import find_start, open_plan
from polyad.train.tasks.random_input import flops_of_unit
from polyad.train.tasks.registry import TASKS


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
        plan = find_start(open_plan(path, overrides, world_size))
        config, dims = plan.config, plan.dims
        epoch = plan.task.samples_per_epoch
        step = plan.resume.training_step if plan.resume else 0
    else:
        config, epoch, step = load_config(path, overrides), None, None
        dims = validate(config, world_size)
        check_without_data(config)
    planned = footprint(config, dims)
    return describe(config, dims, samples_per_epoch=epoch) | {
        "memory_bytes_per_process": planned.memory | {"total": planned.total},
        "goes_on_from_step": step,
        "exports_to": exports_to(config),
    }


def exports_to(config: RunConfig) -> str:
    """Says as what `polyad convert` will write the trained model for other libraries."""
    try:
        return family_of_model(config.model).title
    except WeightsError as error:
        reason = str(error).removesuffix(f"; {OUR_NAMES}")
        reason = reason.partition("transformers has no such architecture: ")[2] or reason
        return f"safetensors under Polyad's names alone: {reason}"
    except ModuleNotFoundError:
        return "unknown without the extra `open` (transformers)"


def check_without_data(config: RunConfig) -> None:
    """Checks that a configuration sets what the data would determine.

    Raises:
        ConfigError: it does not.
    """
    if missing := config.model.left_to_data():
        raise ConfigError(f"{missing}: null takes it from the data; without it a number is needed")


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
    model, train = model_of(config), config.train
    parameters = count_parameters(model)
    unit = TASKS[config.data.kind].unit.name
    units_per_step = train.global_batch_size * config.model.units_per_sample()
    samples = train.steps * train.global_batch_size
    feed_forward, experts = config.model.known_feed_forward(), None
    if isinstance(feed_forward, SelectingConfig):
        experts = {
            "num_experts": feed_forward.num_experts,
            "top_k": feed_forward.used_experts(),
            "layers": sum(isinstance(module, SelectingMoE) for module in model.modules()),
        }
    return {
        "run": config.run.folder,
        "unit": unit,
        "model": {
            "kind": config.model.kind,
            "parameters": parameters,
            "active_parameters": parameters - unused_parameters(model),
            "trained_parameters": trained_parameters(model),
            "experts": experts,
            f"flops_per_{unit}": flops_of_unit(config.model, config.data),
        },
        "training": {
            "steps": train.steps,
            f"{unit}s_per_step": units_per_step,
            f"{unit}s": train.steps * units_per_step,
            "epochs": samples / samples_per_epoch if samples_per_epoch else None,
            "flops": train.steps * flops_per_step(config),
        },
        "layout": {
            "processes": dims.world_size,
            "data_parallel_size": dims.data_parallel_size,
            "tensor_parallel_size": dims.tensor_parallel_size,
            "expert_parallel_size": dims.expert_parallel_size,
            "zero_stage": config.parallel.zero_stage,
            "micro_batch_size": train.micro_batch_size,
            "accumulation_steps": dims.accumulation_steps(
                train.global_batch_size, train.micro_batch_size
            ),
        },
    }


def description_table(description: dict[str, Any]) -> str:
    """Formats a description.

    Returns:
        Aligned lines.
    """
    model, training, unit = description["model"], description["training"], description["unit"]
    layout, memory = description["layout"], description["memory_bytes_per_process"]
    step, experts = description["goes_on_from_step"], model["experts"]
    state = {None: "data and run folder not checked", 0: "a new run"}
    epochs = f", {training['epochs']:,.2f} epochs of the data" if training["epochs"] else ""
    parts = [f"{name} {in_bytes(size)}" for name, size in memory.items() if name != "total"]
    rows = [
        ("run", f"{description['run']}  ({state.get(step, f'continues from step {step}')})"),
        ("model", model["kind"]),
        ("parameters", f"{model['parameters']:,}, {model['trained_parameters']:,} of them trained"),
        ("steps", f"{training['steps']:,} of {training[f'{unit}s_per_step']:,} {unit}s"),
        (f"{unit}s", f"{training[f'{unit}s']:,}{epochs}"),
        ("FLOPs", f"{training['flops']:.3g}, {model[f'flops_per_{unit}']:.3g} per {unit}"),
        ("layout", ", ".join(f"{name.replace('_', ' ')} {layout[name]}" for name in layout)),
        (
            "memory",
            f"about {in_bytes(memory['total'])} per process when run on GPUs  ({', '.join(parts)})",
        ),
    ]
    rows.append(("exports to", description["exports_to"]))
    if experts is not None:
        layers = counted(experts["layers"], "layer")
        size = f"{experts['num_experts']} in each of {layers}, {experts['top_k']} active per token"
        active = f"{model['active_parameters']:,} parameters per token"
        rows[3:3] = [("active", active), ("experts", size)]
    return "\n".join(aligned(rows, "<"))


def inspect(path: Path) -> dict[str, Any]:
    """Opens weights, checks that every tensor is accounted for, and describes them.

    Args:
        path: a folder of another library, a checkpoint, a run, or exported weights.

    Returns:
        JSON values: the `family` of models of another library, or `Polyad`; the section `model` of
        a configuration; `parameters` and `active_parameters` per token; `routed_blocks` that select
        experts, `num_experts` in such a block (0: there is none) and `top_k`; the `tensors` by our
        `name`, with those `stored` in the folder (none if they are ours), and those `not_read`.

    Raises:
        ValueError: they cannot be opened, or contain something unknown; one line says what.
    """
    weights = open_weights(path)
    config = weights.model_config()
    model = build_model(config)
    theirs, family = None, "Polyad"
    if isinstance(weights, FamilyWeights):
        theirs, family = weights, weights.family.title
    elif isinstance(weights, TheirWeights):
        family = f"transformers' {weights.config.config['model_type']}"
    tensors = [
        {
            "name": name,
            "shape": list(parameter.shape),
            "stored": list(theirs.stored_names(name)) if theirs else [],
        }
        for name, parameter in model.named_parameters()
    ]
    routing = {
        int(name.split(".")[1]): module.config
        for name, module in model.named_modules()
        if isinstance(module, SelectingMoE)
    }
    experts = next(iter(routing.values()), None)
    parameters = count_parameters(model)
    return {
        "folder": str(path),
        "family": family,
        "model": config.model_dump(mode="json"),
        "parameters": parameters,
        "active_parameters": parameters - unused_parameters(model),
        "routed_blocks": list(routing),
        "num_experts": 0 if experts is None else experts.num_experts,
        "top_k": 0 if experts is None else experts.known_final_top_k(),
        "tensors": tensors,
        "not_read": list(theirs.unread()) if theirs else [],
    }


def inspection_table(result: dict[str, Any]) -> str:
    """Formats the result of `inspect`."""
    sizes = "{parameters:,}, {active_parameters:,} active per token".format(**result)
    rows = [("folder", result["folder"]), ("family", result["family"]), ("parameters", sizes)]
    if result["num_experts"]:
        blocks = len(result["routed_blocks"])
        experts = f"{result['num_experts']} in each of {blocks} blocks"
        rows.append(("experts", f"{experts}, {result['top_k']} for each token"))
    rows.append(("tensors", f"{len(result['tensors'])} here"))
    if unread := result["not_read"]:
        rows.append(("not read", some_of(unread, 3)))
    return "\n".join(aligned(rows, "<"))
