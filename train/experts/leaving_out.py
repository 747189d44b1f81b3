"""A model in which each sample does without one expert of one layer.

Shapes: B samples, M tokens of a forward pass, N experts of a level, S experts of all levels side by
side, K experts of a token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.mumoe.gating import Gate, GateOutput
from polyad.model.smoe.layer import Router, SelectingMoE
from polyad.model.smoe.selection import Selected
from polyad.train.experts.probing import RoutedLayer

LeaveOut = Callable[[Tensor | None], None]


@contextmanager
def without_capacity(model: nn.Module) -> Iterator[None]:
    """Inside this context no sparse expert drops what exceeds a capacity.

    Args:
        model: in evaluation mode.
    """
    layers = [part for part in model.modules() if isinstance(part, SelectingMoE)]
    before = [layer.config for layer in layers]
    unlimited = {"capacity_factor": None, "evaluation_capacity_factor": None}
    try:
        for layer in layers:
            layer.config = layer.config.model_copy(update=unlimited)
        yield
    finally:
        for layer, config in zip(layers, before, strict=True):
            layer.config = config


@contextmanager
def leaving_out(model: nn.Module, layer: RoutedLayer) -> Iterator[LeaveOut]:
    """Gives a function that says which expert each sample of the next forward passes does without.

    It takes the expert of each sample [B], counted over all levels, or None: none is left out. A
    coefficient, or the weight of a selected expert, becomes 0; the others stay as they are, as if
    the expert's weights were 0 (Oldfield et al. 2024, section 4.1).

    Args:
        model: in evaluation mode, not compiled.
        layer: of the model.
    """
    chosen: list[Tensor | None] = [None]

    def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
        if chosen[0] is None:
            return None
        if isinstance(output, Selected):
            rows_M = _rows(chosen[0], output.expert_ids_NK.shape[0])
            kept_MK = output.expert_ids_NK != rows_M.unsqueeze(-1)
            return output._replace(weights_NK=output.weights_NK * kept_MK)
        assert isinstance(output, GateOutput)
        rows_M = _rows(chosen[0], output.coefficients[0].shape[0])
        return output._replace(coefficients=_without(output.coefficients, rows_M))

    def leave(expert_B: Tensor | None) -> None:
        chosen[0] = expert_B

    parts = [
        part.selection if isinstance(part, Router) else part
        for part in model.get_submodule(layer.name).children()
        if isinstance(part, Gate | Router)
    ]
    handles = [part.register_forward_hook(hook) for part in parts]
    try:
        yield leave
    finally:
        for handle in handles:
            handle.remove()


def _rows(expert_B: Tensor, rows: int) -> Tensor:
    """The expert of each token [M]; the tokens of a sample stand together."""
    return expert_B.repeat_interleave(rows // expert_B.numel())


def _without(levels: list[Tensor], expert_M: Tensor) -> list[Tensor]:
    kept, first = [], 0
    for a_MN in levels:
        columns_N = torch.arange(first, first + a_MN.shape[-1], device=a_MN.device)
        kept.append(a_MN.masked_fill(columns_N == expert_M.unsqueeze(-1), 0))
        first += a_MN.shape[-1]
    return kept
