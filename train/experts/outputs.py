"""What single experts make of the tokens of a forward pass, whichever the router sent where.

Shapes: N tokens of a forward pass, M of them that are asked for, D width of an output.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyad.model.emoe.layer import EmergentMoE
from polyad.model.mixture import Mixture
from polyad.model.mumoe.head import MuMoEHead
from polyad.model.mumoe.layer import MuMoE
from polyad.model.smoe.layer import SelectingMoE
from polyad.model.smoe.selection import Selected

Outputs = Callable[[int, int, Tensor], Tensor]
"""From a level, the number of one of its experts, and rows [M], what it makes of them [M, D]."""


def watch_inputs(layer: nn.Module, seen: Callable[[Outputs], None]) -> RemovableHandle:
    """Hooks a layer with experts, in evaluation and whole on this process.

    Args:
        layer: of any kind that routes.
        seen: gets what gives outputs, after the layer's router in each forward pass.
    """
    read, outputs = _parts(layer)

    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        seen(lambda level, expert, rows_M: outputs(arguments, level, expert, rows_M))

    return read.register_forward_hook(hook)


def _parts(layer: nn.Module) -> tuple[nn.Module, Callable[[Any, int, int, Tensor], Tensor]]:
    """The module that reads what experts do, and their outputs from its arguments."""
    # Parts are called by their `forward`, which runs no hooks again.
    if isinstance(layer, SelectingMoE):
        return layer.dispatcher, lambda read, level, expert, rows_M: _sparse(
            layer, read[0][rows_M], expert
        )
    if isinstance(layer, MuMoE):
        return layer.up, lambda read, level, expert, rows_M: _factorized(
            [layer.up, layer.down], read, level, expert, rows_M
        )
    if isinstance(layer, MuMoEHead):
        return layer.layer, lambda read, level, expert, rows_M: _factorized(
            [layer.layer], read, level, expert, rows_M
        )
    assert isinstance(layer, Mixture)
    return layer, lambda read, level, expert, rows_M: _network(layer, read[0][rows_M], expert)


def _sparse(layer: SelectingMoE, tokens_MD: Tensor, expert: int) -> Tensor:
    """An expert's output with its own bias; the one bias of a split feed-forward is no expert's."""
    weights_M1 = tokens_MD.new_ones(len(tokens_MD), 1)
    ids_M1 = torch.full_like(weights_M1, expert, dtype=torch.int64)
    alone = Selected.of(weights_M1, ids_M1, layer.config.num_experts)
    y_MD, _ = layer.dispatcher.forward(tokens_MD, alone, layer.experts)
    if layer.output_bias is None or isinstance(layer, EmergentMoE):
        return y_MD
    return layer.add_bias(y_MD, alone)


def _factorized(layers: list[Any], read: Any, level: int, expert: int, rows_M: Tensor) -> Tensor:
    """The output where one expert has the whole coefficient; those of other levels stay."""
    x_MD: Tensor = read[0][rows_M]
    coefficients = [a_NE[rows_M] for a_NE in read[1]]
    alone_ME = torch.zeros_like(coefficients[level])
    alone_ME[:, expert] = 1
    coefficients[level] = alone_ME
    for each in layers:
        x_MD = each.forward(x_MD, coefficients)
    return x_MD


def _network(mixture: Mixture, images_MCHW: Tensor, expert: int) -> Tensor:
    """The probabilities that a network gives the classes, or the logits if those are mixed."""
    logits_MK: Tensor = mixture.experts[expert](images_MCHW).output_BO
    return logits_MK.softmax(-1) if mixture.config.gives_log_probabilities() else logits_MK
