"""Equal loads of experts, for measurements of time that do not depend on what a router learned."""

import functools

import torch
from torch import Tensor, nn

from polyad.model.smoe.layer import SelectingMoE
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import routed_layers


def force_equal_loads(model: nn.Module) -> None:
    """Permanently sends token i of a micro-batch to experts i K to i K + K - 1, modulo E.

    Expert loads are then equal, or differ by one token if E does not divide the number of
    assignments, so that a step takes the time of balanced routing. What such a model learns is
    meaningless. Weights are still computed from the scores.

    Args:
        model: not compiled yet.

    Raises:
        ConfigError: no layer of it selects experts.
    """
    layers = routed_layers(model)
    modules = [model.get_submodule(layer.name) for layer in layers]
    selecting = [module for module in modules if isinstance(module, SelectingMoE)]
    if not selecting:
        why = "the model has no experts"
        if layers:
            kind = type(modules[0]).__name__
            why = f"{layers[0].name} ({kind}) gives a token a share of every expert, selects none"
        raise ConfigError(f"loads of experts cannot be forced to be equal: {why}")
    for module in selecting:
        selection = module.router.selection
        selection.forced = functools.partial(_in_turn, num_experts=selection.num_experts)


def _in_turn(best_NK: Tensor, *, num_experts: int) -> Tensor:
    tokens, top_k = best_NK.shape
    assignments_A = torch.arange(tokens * top_k, device=best_NK.device)
    return assignments_A.remainder(num_experts).view(tokens, top_k)
