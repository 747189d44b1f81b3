"""`polyad evaluate --specialization`: for how many classes each expert matters."""

import time
from pathlib import Path
from typing import Any

import torch

from data.evaluation import evaluation_batches
from data.text.manifest import SplitName
from parallel import comm
from parallel.weights import Choice, load_model
from train.config.smaller import to_evaluate
from train.console import Progress
from train.errors import ConfigError
from train.evaluation.evaluate import open_evaluated
from train.experts.probing import routed_head, routed_layers
from train.experts.specialization import LeaveOneOut, polysemanticity
from train.guard.memory import explain_out_of_memory
from train.loop.device import allow_tf32


def specialization(
    path: Path,
    *,
    data: str | None = None,
    split: SplitName = "validation",
    overrides: tuple[str, ...] = (),
    weights: Choice = "trained",
    base: Path | None = None,
) -> dict[str, Any]:
    """Measures class polysemanticity of all experts, in one process or under torchrun.

    Args:
        path: a checkpoint, or a run whose newest one is taken.
        data: prepared images; None takes the run's.
        split: `validation`, `test` or `train`.
        overrides: `key=value` for keys that evaluation reads.
        weights: which of the checkpoint's.
        base: see `open_weights`.

    Returns:
        JSON values, the same on each process.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    opened = open_evaluated(path, data, overrides, weights, base)
    task, config = opened.images("--specialization"), opened.config
    task.check_split(split)
    world = comm.initialize(config.parallel.timeout_minutes)
    allow_tf32(config.train.tf32, world.device)
    started = time.monotonic()
    names = task.data.manifest.class_names
    with explain_out_of_memory(lambda: "leaving out experts", world, to_evaluate(config)):
        model = load_model(opened.checkpoint, world.device, config.train.precision)
        head = routed_head(model)
        layers = [*routed_layers(model), *([head] if head else [])]
        if not layers:
            raise ConfigError(
                f"--specialization: {path}: its model has no experts, in blocks or as its head"
            )
        counts = [LeaveOneOut(model, layer, len(names), opened.batch_size) for layer in layers]
        total = task.units_of(split)
        report = Progress("leave out experts", total, "img") if world.is_main else None
        done = 0
        for batch, counts_B in evaluation_batches(
            task.held_out(split),
            total,
            opened.batch_size,
            rank=world.data_parallel_rank,
            ranks=world.data_parallel_size,
            num_workers=task.settings.num_workers,
        ):
            images_BCHW = task.inputs(batch.images_BCHW[counts_B].to(world.device))
            labels_B = batch.labels_B[counts_B].to(world.device)
            for count in counts if len(labels_B) else []:
                count.add(images_BCHW, labels_B)
            done += len(counts_B) * world.data_parallel_size
            if report is not None:
                report(min(1.0, done / total))
    return {
        "checkpoint": str(opened.checkpoint.folder),
        "step": opened.checkpoint.training_step,
        "data": task.name,
        "split": split,
        "images_scored": total,
        "layers": {count.layer.name: _layer(count, names, total, world) for count in counts},
        "weights": weights,
        "precision": config.train.precision,
        "processes": world.size,
        "seconds": time.monotonic() - started,
    }


def _layer(count: LeaveOneOut, names: list[str], images: int, world: comm.World) -> dict[str, Any]:
    parts = [count.right_K, count.images_K, count.lost_SK.flatten(), count.pairs]
    summed = comm.sum_over_samples(torch.cat(parts), world).cpu()
    right_K, images_K, lost, pairs = torch.split(summed, [len(part) for part in parts])
    found = polysemanticity(right_K, lost.view(count.lost_SK.shape))
    experts = count.layer.num_experts
    return {
        "experts": experts,
        "polysemanticity": found.mean,
        "experts_that_matter": int(found.expert_S.isfinite().sum()),
        "top1": float(right_K.sum() / images_K.sum()),
        "histogram": found.histogram(),
        "each": {
            count.layer.expert_name(column): {
                "polysemanticity": float(p),
                "class": names[int(best)],
            }
            for column, (p, best) in enumerate(zip(found.expert_S, found.class_S, strict=True))
            if best >= 0
        },
        "images_computed_again": int(pairs),
        "share_of_all_pairs": int(pairs) / (images * experts),
    }


def specialization_table(result: dict[str, Any]) -> str:
    """A result for a person."""
    rows = [
        ("checkpoint", f"{result['checkpoint']} (step {result['step']:,})"),
        ("split", f"{result['split']} of {result['data']}, {result['images_scored']:,} images"),
        ("processes", f"{result['processes']}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    width = max(map(len, result["layers"]))
    lines += ["", f"{'':{width}}  polysemanticity  experts that matter  computed again"]
    for name, layer in result["layers"].items():
        mean = "none" if layer["polysemanticity"] is None else f"{layer['polysemanticity']:.4f}"
        matter = f"{layer['experts_that_matter']:,} of {layer['experts']:,}"
        again = f"{100 * layer['share_of_all_pairs']:.2f}%"
        lines.append(f"{name:{width}}  {mean:>15}  {matter:>19}  {again:>14}")
    return "\n".join(lines)
