"""`polyad inspect`: shows the contents of a folder of weights."""

from pathlib import Path
from typing import Any

from polyad.model.build import build_model, count_parameters
from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel.families import FamilyWeights
from polyad.parallel.foreign import TheirWeights
from polyad.parallel.weights import Weights, open_weights
from polyad.train.config.adaptation import unused_parameters
from polyad.train.results import aligned


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
    theirs = weights if isinstance(weights, FamilyWeights) else None
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
        "family": _title(weights),
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
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        rows.append(("not read", f"{', '.join(unread[:3])}{more}"))
    return "\n".join(aligned(rows, "<"))


def _title(weights: Weights) -> str:
    """The family of a model of another library, or Polyad."""
    if isinstance(weights, FamilyWeights):
        return weights.family.title
    if isinstance(weights, TheirWeights):
        return f"transformers' {weights.config.config['model_type']}"
    return "Polyad"
