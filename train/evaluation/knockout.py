"""`polyad evaluate --knockout`: what each expert of a language model is for.

The loss of each class of tokens without the expert; with `--steer` also the loss of the same
classes when text is moved towards it, and what the model then predicts.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from polyad.data.text.manifest import SplitName
from polyad.model.gpt2 import GPT2
from polyad.parallel import comm
from polyad.parallel.weights import Choice
from polyad.train.console import Progress
from polyad.train.errors import ConfigError
from polyad.train.evaluation.evaluate import open_evaluated
from polyad.train.experts.chosen import check_experts, choose_layers, columns_of
from polyad.train.experts.knockout_pass import KNOCKOUT_TOKENS, read_without
from polyad.train.experts.predicted_text import PredictedText
from polyad.train.experts.probing import RoutedLayer, routed_layers
from polyad.train.experts.steering import Steering, gate_column
from polyad.train.tasks.text import TextTask


def knockout(
    path: Path,
    *,
    tokens: int = KNOCKOUT_TOKENS,
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
    started = time.monotonic()
    with opened.loaded("leaving out experts", split) as (model, world):
        chosen = _chosen(model, path, layers, experts, steerings)
        text = PredictedText(task, split, tokens)
        amount = text.windows * text.length
        found, effect = read_without(
            *(model, chosen, steerings, text, opened.batch_size),
            rank=world.data_parallel_rank,
            ranks=world.data_parallel_size,
            summed=lambda values: comm.sum_over_samples(values, world),
            report=Progress("leave out experts", amount) if world.is_main else lambda share: None,
        )
    return {
        **opened.about(),
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
