"""The pass over held-out text that leaves out experts, for `evaluate --knockout` and the report."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from polyad.model.gpt2 import GPT2
from polyad.train.experts.gate_entropy import Summed
from polyad.train.experts.knockout import KnockOut, LayerWithout
from polyad.train.experts.predicted_text import (
    ClassColumns,
    PredictedText,
    embedded,
    losses,
    through,
)
from polyad.train.experts.probing import RoutedLayer, deciding
from polyad.train.experts.steering import Steering
from polyad.train.experts.steering_effect import SteeredReading, SteeringEffect

KNOCKOUT_TOKENS = 65_536
"""About how many tokens are read, unless the user says it."""


@torch.inference_mode()
def read_without(
    model: nn.Module,
    chosen: Sequence[tuple[RoutedLayer, Sequence[int]]],
    steerings: Sequence[Steering],
    text: PredictedText,
    batch_size: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    summed: Summed = lambda values: values,
    report: Callable[[float], None] = lambda share: None,
) -> tuple[list[LayerWithout], SteeringEffect | None]:
    """Reads a text as the model is, without experts, and steered.

    Args:
        model: in evaluation mode, whole on each process.
        chosen: layers, and the columns of the experts of each that are left out.
        steerings: all at once; none: no effect of them is measured.
        text: that is read.
        batch_size: windows in a forward pass.
        rank: of this process.
        ranks: that share the windows.
        summed: over them.
        report: is told the share done.

    Returns:
        Of each layer what was found, and of steering; the same on each process.

    Raises:
        ConfigError: losses are not finite.
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
    device, done = next(model.parameters()).device, 0
    for passages in text.batches(batch_size, rank, ranks, device):
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
        done += len(passages.number_B) * ranks
        report(min(1.0, done / text.windows))
    effect = None if steered is None else steered.result(summed)
    return [each.result(summed) for each in sums], effect
