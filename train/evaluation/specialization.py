"""`polyad evaluate --specialization`: how experts divide the work; of images also for how many
classes each expert matters, by leaving it out."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyad.data.evaluation import evaluation_batches
from polyad.data.text.manifest import SplitName
from polyad.model.mixture import Mixture
from polyad.parallel import comm
from polyad.parallel.weights import Choice
from polyad.train.console import Progress
from polyad.train.errors import ConfigError
from polyad.train.evaluation.evaluate import open_evaluated
from polyad.train.evaluation.routing_measures import classes_of, measure_sequences, measure_text
from polyad.train.experts.probing import RoutedLayer, deciding, routed_head, routed_layers
from polyad.train.experts.routing_measures import RoutingMeasures
from polyad.train.experts.specialization import LeaveOneOut, polysemanticity
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.sequences import SequenceTask
from polyad.train.tasks.text import TextTask

UNITS = ("images", "sequences", "tokens")
"""What is read."""


def specialization(
    path: Path,
    *,
    data: str | None = None,
    split: SplitName = "validation",
    overrides: tuple[str, ...] = (),
    weights: Choice = "trained",
    base: Path | None = None,
) -> dict[str, Any]:
    """Measures how experts divide the work, in one process or under torchrun.

    Of every router the entropies of its probabilities, and what its experts tell about labels; of
    images with one class each also the class polysemanticity of all experts.

    Args:
        path: a checkpoint, or a run whose newest one is taken.
        data: as `data.path`; None takes the run's.
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
    task, config = opened.task, opened.config
    if not isinstance(task, ImageClassification | SequenceTask | TextTask):
        raise ConfigError(
            f"--specialization: is not allowed with data.kind: {config.data.kind}; images, "
            f"attributes, sequences, text and masked_text have it"
        )
    task.check_split(split)
    started = time.monotonic()
    with opened.loaded("measuring experts", split) as (model, world):
        head = routed_head(model)
        layers = [*routed_layers(model), *([head] if head else [])]
        if not layers:
            raise ConfigError(
                f"--specialization: {path}: its model has no experts, in blocks or as its head"
            )
        rest = (split, opened.batch_size, world)
        if isinstance(task, ImageClassification):
            found = _images(model, layers, task, *rest)
        elif isinstance(task, SequenceTask):
            measures = measure_sequences(model, layers, task, *rest)
            found = {"sequences_scored": measures.samples, "layers": _levels(measures, world)}
        else:
            measures, tokens = measure_text(model, layers, task, *rest)
            found = {
                "tokens_scored": tokens,
                "windows_scored": measures.samples,
                "layers": _levels(measures, world),
            }
    return {
        **opened.about(),
        "data": task.name,
        "data_kind": config.data.kind,
        "split": split,
        **found,
        "weights": weights,
        "precision": config.train.precision,
        "processes": world.size,
        "seconds": time.monotonic() - started,
    }


def _levels(measures: RoutingMeasures, world: comm.World) -> dict[str, Any]:
    found = measures.result(lambda values: comm.sum_over_samples(values, world)).to_json()
    return {name: {"levels": levels} for name, levels in found.items()}


@torch.inference_mode()
def _images(
    model: nn.Module,
    layers: list[RoutedLayer],
    task: ImageClassification,
    split: SplitName,
    batch_size: int,
    world: comm.World,
) -> dict[str, Any]:
    """Reads all images. Those with attributes have no one class: entropies alone are known."""
    total, names = task.units_of(split), list(task.data.manifest.class_names)
    measures = RoutingMeasures(layers, total, world.device)
    measures.by_output(batch_size)
    counts: list[LeaveOneOut] = []
    if not task.has_attributes:
        measures.by_class(*classes_of(task, split))
        counts = [
            LeaveOneOut(model, layer, len(names), batch_size)
            for layer in layers
            if not isinstance(model.get_submodule(layer.name), Mixture)  # whole networks
        ]
    report = Progress("leave out experts", total, "img") if world.is_main else None
    done, first = 0, world.data_parallel_rank
    for batch, counts_B in evaluation_batches(
        task.held_out(split),
        total,
        batch_size,
        rank=world.data_parallel_rank,
        ranks=world.data_parallel_size,
        num_workers=task.settings.num_workers,
    ):
        images_BCHW = task.inputs(batch.images_BCHW[counts_B].to(world.device))
        labels_B = batch.labels_B[counts_B].to(world.device)
        if len(labels_B):
            with deciding(model, layers) as decisions:
                model(images_BCHW)
            number_B = torch.arange(len(labels_B), device=world.device) + first * len(counts_B)
            measures.add(decisions, None, number_B)
        for count in counts if len(labels_B) else []:
            count.add(images_BCHW, labels_B)
        done += len(counts_B) * world.data_parallel_size
        first += world.data_parallel_size
        if report is not None:
            report(min(1.0, done / total))
    left_out = {count.layer.name: _layer(count, names, total, world) for count in counts}
    return {
        "images_scored": total,
        "layers": {
            name: left_out.get(name, {}) | levels
            for name, levels in _levels(measures, world).items()
        },
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
    read = next(name for name in UNITS if f"{name}_scored" in result)
    rows = [
        ("checkpoint", f"{result['checkpoint']} (step {result['step']:,})"),
        ("split", f"{result['split']} of {result['data']}, {result[f'{read}_scored']:,} {read}"),
        ("processes", f"{result['processes']}"),
    ]
    if result["data_kind"] == "attributes":
        rows.append(("not known", "polysemanticity, information, purity: they need one class each"))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    layers = result["layers"]
    return "\n".join(
        [*lines, *_left_out_rows(layers), *_measure_rows(layers), *_similarity_rows(layers)]
    )


def _left_out_rows(layers: dict[str, Any]) -> list[str]:
    """Polysemanticity, of models of images with one class each."""
    if not all("polysemanticity" in layer for layer in layers.values()):
        return []
    width = max(map(len, layers))
    lines = ["", f"{'':{width}}  polysemanticity  experts that matter  computed again"]
    for name, layer in layers.items():
        mean = "none" if layer["polysemanticity"] is None else f"{layer['polysemanticity']:.4f}"
        matter = f"{layer['experts_that_matter']:,} of {layer['experts']:,}"
        again = f"{100 * layer['share_of_all_pairs']:.2f}%"
        lines.append(f"{name:{width}}  {mean:>15}  {matter:>19}  {again:>14}")
    return lines


def _measure_rows(layers: dict[str, Any]) -> list[str]:
    """Entropies of each level, and what its experts tell about each kind of label."""
    heads = ("", "H_s", "H_u", "at most", "I(E; Y)", "by chance", "normalized", "purity",
             "of the highest share", "by chance")  # fmt: skip
    table: list[tuple[str, ...]] = []
    for name, layer in layers.items():
        for number, level in enumerate(layer["levels"]):
            title = name if len(layer["levels"]) == 1 else f"{name}, level {number}"
            entropies = (level["entropy_bits"], level["usage_entropy_bits"])
            told = (*map(_number, entropies), f"{level['highest_entropy_bits']:.2f}")
            table.append((title, *told, *[""] * 6))
            for label, each in level["labels"].items():
                chance = f"{each['information_bits_by_chance']:.4f}"
                ratios = (each["normalized_information"], each["purity"])
                said = (_number(each["information_bits"]), chance, *map(_number, ratios))
                hard = ("", "")
                if highest := each.get("information_bits_of_highest"):
                    by_chance = each["information_bits_of_highest_by_chance"]
                    hard = (_number(highest), f"{by_chance:.4f}")
                table.append((f"  by {label}", "", "", "", *said, *hard))
    lines = _aligned([heads, *table])
    return ["", "entropies and information in bits, 95% intervals over samples", *lines]


def _similarity_rows(layers: dict[str, Any]) -> list[str]:
    """How alike the outputs of experts are on the same tokens."""
    table: list[tuple[str, ...]] = [("", "experts", "tokens", "cosine", "CKA")]
    for name, layer in layers.items():
        for number, level in enumerate(layer["levels"]):
            title = name if len(layer["levels"]) == 1 else f"{name}, level {number}"
            alike = level["similarity"]
            sizes = (str(len(alike["experts"])), f"{alike['tokens']:,}")
            table.append((title, *sizes, _number(alike["cosine"]), _number(alike["cka"])))
    heading = "outputs of experts on the same tokens, means over pairs, 95% intervals over batches"
    return ["", heading, *_aligned(table)]


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table whose first column is of names."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in table
    ]


def _number(measure: dict[str, Any]) -> str:
    """A measure, and its interval in brackets."""
    if measure["value"] is None:
        return "none"
    if measure["interval"] is None:
        return f"{measure['value']:.4f}"
    low, high = measure["interval"]
    return f"{measure['value']:.4f} [{low:.4f}, {high:.4f}]"
