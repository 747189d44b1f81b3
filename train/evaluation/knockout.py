"""`polyad evaluate --knockout`: what each expert of a language model is for.

The loss of each class of tokens without the expert; with `--steer` also the loss of the same
classes when text is moved towards it, and what the model then predicts.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.text.manifest import SplitName
from model.gpt2 import GPT2
from parallel import comm
from parallel.weights import Choice, load_model
from train.config.smaller import to_evaluate
from train.console import Progress
from train.errors import ConfigError
from train.evaluation.evaluate import open_evaluated
from train.experts.chosen import check_experts, choose_layers, columns_of
from train.experts.knockout import KnockOut, LayerWithout
from train.experts.predicted_text import (
    ClassColumns,
    PredictedText,
    embedded,
    losses,
    through,
)
from train.experts.probing import RoutedLayer, deciding, routed_layers
from train.experts.steering import Steering, gate_column
from train.experts.steering_effect import SteeredReading, SteeringEffect
from train.guard.memory import explain_out_of_memory
from train.loop.device import allow_tf32
from train.tasks.text import TextTask

PROBE_TOKENS = 65_536
"""About how many tokens are read, unless the user says it."""


def knockout(
    path: Path,
    *,
    tokens: int = PROBE_TOKENS,
    layers: Sequence[str] = (),
    experts: Sequence[str] = (),
    steerings: Sequence[Steering] = (),
    data: str | None = None,
    split: SplitName = "validation",
    overrides: tuple[str, ...] = (),
    weights: Choice = "trained",
    base: Path | None = None,
) -> dict[str, Any]:
    """Leaves out experts one by one, in one process or under torchrun.

    Args:
        path: a checkpoint, or a run whose newest one is taken.
        tokens: about how many are read, in whole windows, evenly over the split.
        layers: blocks whose experts are left out, by number, or `all`; none: the first, the middle
            and the last that routes, or with steerings those that are steered.
        experts: that are left out in each of these; none: all, or with steerings and without
            layers those that are steered to.
        steerings: whose effect, all at once, is measured on the same tokens.
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
    if not isinstance(task, TextTask):
        raise ConfigError(
            f"--knockout: is not allowed with data.kind: {config.data.kind}; text and masked_text "
            f"have it, and images --specialization"
        )
    task.check_split(split)
    world = comm.initialize(config.parallel.timeout_minutes)
    allow_tf32(config.train.tf32, world.device)
    started = time.monotonic()
    with explain_out_of_memory(lambda: "leaving out experts", world, to_evaluate(config)):
        model = load_model(opened.checkpoint, world.device, config.train.precision)
        chosen = _chosen(model, path, layers, experts, steerings)
        text = PredictedText(task, split, tokens)
        found, effect = read(model, chosen, steerings, text, opened.batch_size, world)
    return {
        "checkpoint": str(opened.checkpoint.folder),
        "step": opened.checkpoint.training_step,
        "data": task.name,
        "data_kind": config.data.kind,
        "split": split,
        "windows_read": text.windows,
        "sequence_length": text.length,
        "tokens_scored": int(found[0].by_class["all"].tokens_C[0]),
        "loss": float(found[0].by_class["all"].loss_C[0]),
        "layers": {each.layer.name: each.to_json() for each in found},
        "steering": None if effect is None else effect.to_json(),
        "weights": weights,
        "precision": config.train.precision,
        "processes": world.size,
        "seconds": time.monotonic() - started,
    }


def _chosen(
    model: nn.Module,
    path: Path,
    blocks: Sequence[str],
    experts: Sequence[str],
    steerings: Sequence[Steering],
) -> list[tuple[RoutedLayer, list[int]]]:
    """The layers, and the columns of the experts of each that are left out."""
    routed = routed_layers(model)
    if not routed:
        raise ConfigError(f"--knockout: {path}: its model has no experts")
    if steerings and not isinstance(model, GPT2):
        raise ConfigError(f"--steer {steerings[0]}: {path}: only a GPT-2 is steered")
    for steering in steerings:
        gate_column(model, steering)  # refuses what is not there
    if not steerings or blocks or experts:
        layers = choose_layers(routed, blocks)
        check_experts(layers, experts)
        return [(layer, columns_of(layer, experts)) for layer in layers]
    by_block = {layer.block: layer for layer in routed}
    chosen: dict[int, set[int]] = {}
    for each in steerings:
        first = sum(by_block[each.layer].levels[: each.level])
        chosen.setdefault(each.layer, set()).add(first + each.expert)
    return [(by_block[block], sorted(columns)) for block, columns in sorted(chosen.items())]


@torch.inference_mode()
def read(
    model: nn.Module,
    chosen: Sequence[tuple[RoutedLayer, Sequence[int]]],
    steerings: Sequence[Steering],
    text: PredictedText,
    batch_size: int,
    world: comm.World,
) -> tuple[list[LayerWithout], SteeringEffect | None]:
    """Reads a text as the model is, without experts, and steered.

    Args:
        model: in evaluation mode, whole on each process.
        chosen: layers, and the experts of each that are left out.
        steerings: all at once; none: no effect of them is measured.
        text: that is read.
        batch_size: windows in a forward pass.
        world: this process.

    Returns:
        Of each layer what was found, and of steering; the same on each process.
    """
    columns = ClassColumns(text)
    sums = [
        KnockOut(model, *each, columns.classes, windows=text.windows, length=text.length)
        for each in chosen
    ]
    steered = None
    if steerings:
        assert isinstance(model, GPT2)
        steered = SteeredReading(model, steerings, text, columns)
    layers = [each.layer for each in sums]
    amount = text.windows * text.length
    report = Progress("leave out experts", amount) if world.is_main else lambda share: None
    done = 0
    for passages in text.batches(batch_size, world):
        if len(passages.number_B):
            kept = {layer.block: passages.ids_BT for layer in layers}
            with deciding(model, layers) as decisions:
                x_BTD = through(model, embedded(model, passages), kept=kept)
            loss_BP, label_JBP = losses(model, x_BTD, passages), columns(passages)
            for each in sums:
                decision = decisions[each.layer.name]
                each.add(kept[each.layer.block], passages, label_JBP, loss_BP, decision)
            if steered is not None:
                steered.add(passages, label_JBP, x_BTD, loss_BP)
        done += len(passages.number_B) * world.data_parallel_size
        report(min(1.0, done / text.windows))

    def summed(values: torch.Tensor) -> torch.Tensor:
        return comm.sum_over_samples(values, world)

    effect = None if steered is None else steered.result(summed)
    return [each.result(summed) for each in sums], effect
