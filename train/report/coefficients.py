"""How much of each expert every token gets, read from a model in evaluation.

Training never keeps this: statistics are returned as means. Here a hook on the gate of a muMoE or
on the router of sparse experts hands out what it decided in one forward pass.

Shapes: B windows, T tokens of a window, M = B T tokens, N experts of a level, S experts of all
levels side by side, K experts of a token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model.interface import FeedForward
from model.mumoe.gating import Gate, Gated
from model.smoe.router import Router, Routing
from model.smoe.selection import Selected


@dataclass(frozen=True, kw_only=True)
class RoutedLayer:
    """One feed-forward with experts."""

    name: str
    """As in the names of parameters: blocks.3.feed_forward."""
    levels: tuple[int, ...]
    """Experts of each level; of sparse experts one level."""

    @property
    def block(self) -> int:
        """The number in its name."""
        return int(next(part for part in self.name.split(".") if part.isdigit()))

    @property
    def num_experts(self) -> int:
        """Of all levels."""
        return sum(self.levels)

    def expert_name(self, column: int) -> str:
        """An expert as a user writes it: its number, or LEVEL.NUMBER where there are several."""
        if len(self.levels) == 1:
            return str(column)
        level = 0
        while column >= self.levels[level]:
            column -= self.levels[level]
            level += 1
        return f"{level}.{column}"


def routed_layers(model: nn.Module) -> list[RoutedLayer]:
    """The layers with experts, in the order of the model.

    Args:
        model: of any kind.
    """
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, FeedForward):
            for part in module.children():
                if isinstance(part, Gate):
                    layers.append(RoutedLayer(name=name, levels=tuple(part.norm.num_experts)))
                elif isinstance(part, Router):
                    experts = part.selection.config.num_experts
                    layers.append(RoutedLayer(name=name, levels=(experts,)))
    return layers


Reader = Callable[[Tensor], dict[str, Tensor]]


@contextmanager
def reading(model: nn.Module, layers: Sequence[RoutedLayer]) -> Iterator[Reader]:
    """Gives a function from input ids [B, T] to the coefficients [B, T, S] of each layer, by name.

    Of sparse experts a coefficient is the weight of the expert's output, 0 if it was not selected.

    Args:
        model: in evaluation mode, on one device.
        layers: of the model.
    """
    seen: dict[str, Tensor] = {}

    def hook(layer: RoutedLayer) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            seen[layer.name] = _coefficients(output, layer.num_experts)

        return keep

    def read(input_ids_BT: Tensor) -> dict[str, Tensor]:
        with torch.inference_mode():
            model(input_ids_BT)
        result = {
            name: a_MS.view(*input_ids_BT.shape, a_MS.shape[-1]) for name, a_MS in seen.items()
        }
        seen.clear()
        return result

    handles = [
        part.register_forward_hook(hook(layer))
        for layer in layers
        for part in model.get_submodule(layer.name).children()
        if isinstance(part, Gate | Router)
    ]
    try:
        yield read
    finally:
        for handle in handles:
            handle.remove()


def _coefficients(output: Gated | Routing, num_experts: int) -> Tensor:
    if isinstance(output, Gated):
        return torch.cat(output.coefficients, dim=-1).float()
    return _dense(output.selected, num_experts)


def _dense(selected: Selected, num_experts: int) -> Tensor:
    weights_MK = selected.weights_NK.float()
    a_MS = weights_MK.new_zeros(weights_MK.shape[0], num_experts)
    return a_MS.scatter(1, selected.expert_ids_NK, weights_MK)
