"""Experts that are groups of the inner units of one dense feed-forward.

    y = sum over the experts e of a token: activation(x K_e^T + b_e) V_e

The keys K are the rows of the dense feed-forward's first matrix, the values V the columns of its
second one. With a gate, the keys are the gate's rows, and the activation is multiplied by
x L_e^T + c_e, with L the rows of the up projection.

Shapes: N tokens, E experts, D width, F inner units of one expert, U = E F of all.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.feedforward import (
    ACTIVATIONS,
    GATED,
    Activation,
    FeedForwardContext,
    GatedActivation,
)
from polyad.model.initialization import ZEROS, Initializer, normal
from polyad.model.smoe.dispatch import Dispatched, Dispatcher, make_plan
from polyad.model.smoe.experts import ExpertWeights, StackedExperts
from polyad.model.smoe.selection import Selected, spread


def activated(
    activation: Activation | GatedActivation,
    x_ND: Tensor,
    keys_UD: Tensor | None,
    bias_U: Tensor | None,
    linear_UD: Tensor | None,
    linear_bias_U: Tensor | None,
) -> Tensor:
    """Computes the inner units of a feed-forward, [N, U]; with a gate multiplied by `linear`."""
    assert keys_UD is not None
    keys_NU = linear(x_ND, keys_UD, bias_U)
    if linear_UD is None:
        found: Tensor = ACTIVATIONS[activation]()(keys_NU)
        return found
    return GATED[activation](keys_NU, linear(x_ND, linear_UD, linear_bias_U))


class UnitGroups(StackedExperts):
    """E groups of units: keys, an activation as in the dense feed-forward, values.

    Args:
        config: The layer's configuration.
        context: Settings of the model.
    """

    inner_axes: ClassVar[dict[str, int]] = {
        "keys": 1, "bias": 1, "linear": 1, "linear_bias": 1, "values": 1,
    }  # fmt: skip

    def __init__(self, config: EmergentMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(config, context, activation=context.activation)
        experts, width = config.num_experts, context.hidden_size
        inner = self.num_units = config.group_size(width)
        self.keys = nn.Parameter(torch.empty(experts, inner, width))
        self.bias = nn.Parameter(torch.empty(experts, inner)) if context.bias else None
        self.values = nn.Parameter(torch.empty(experts, inner, width))
        self.linear = self.linear_bias = None
        if context.activation in GATED:
            self.linear = nn.Parameter(torch.empty_like(self.keys))
            self.linear_bias = nn.Parameter(torch.empty(experts, inner)) if context.bias else None

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of each parameter, per expert; see `model/initialization.py`."""
        entries = {
            "keys": normal(self.context.initializer_std).each_expert(),
            "linear": normal(self.context.initializer_std).each_expert(),
            "values": normal(self.context.residual_std).each_expert(),
            "bias": ZEROS.each_expert(),
            "linear_bias": ZEROS.each_expert(),
        }
        return {name: each for name, each in entries.items() if getattr(self, name) is not None}

    def stacked(self) -> ExpertWeights:
        """See `StackedExperts.stacked`."""
        keys_EDF = self.keys.transpose(1, 2)
        if self.linear is None:
            return ExpertWeights(keys_EDF, self.bias, self.values)
        linear_EDF = self.linear.transpose(1, 2)
        return ExpertWeights(
            linear_EDF, self.linear_bias, self.values, gate=keys_EDF, gate_bias=self.bias
        )

    def units(self, tokens_ND: Tensor) -> Tensor:
        """Computes the inner layer of all experts, after its activation.

        Args:
            tokens_ND: Tokens.

        Returns:
            [N, E, F].
        """
        flat = (
            None if each is None else each.flatten(0, 1)
            for each in (self.keys, self.bias, self.linear, self.linear_bias)
        )
        inner_NU = activated(self.context.activation, tokens_ND, *flat)
        return inner_NU.view(-1, *self.keys.shape[:2])

    def masked(self, inner_NEF: Tensor, weights_NE: Tensor) -> Tensor:
        """Computes all units of all tokens in one product, with weight 0 for unused experts.

        Args:
            inner_NEF: `units` of the tokens.
            weights_NE: The weights of every expert.

        Returns:
            [N, D].
        """
        inner_NEF = inner_NEF * weights_NE.unsqueeze(-1)
        output_ND: Tensor = inner_NEF.flatten(1) @ self.values.flatten(0, 1)
        return output_ND


class MaskedDispatcher(Dispatcher):
    """A dispatcher that moves no tokens: every expert processes all of them."""

    def forward(
        self,
        tokens_ND: Tensor,
        selected: Selected,
        experts: StackedExperts,
        capacity_factor: float | None = None,
    ) -> Dispatched:
        """Sums the outputs of the chosen groups, like `Dispatcher.forward` for experts.

        The result has a plan only if a capacity may drop assignments.
        """
        assert isinstance(experts, UnitGroups)
        tokens_ND = self.regions.tokens(tokens_ND)
        selected = selected._replace(weights_NK=self.regions.weights(selected.weights_NK))
        plan, kept_NK = None, None
        if capacity_factor is not None:
            plan = make_plan(selected.expert_ids_NK, selected.counts_E, capacity_factor)
            kept_NK = plan.kept_M()[plan.row_A].view_as(selected.weights_NK)
            selected = selected._replace(weights_NK=selected.weights_NK * kept_NK)
        weights_NE = spread(selected, experts.config.num_experts).to(tokens_ND.dtype)
        inner_NEF = experts.units(tokens_ND)
        y_ND = self.regions.output(experts.masked(inner_NEF, weights_NE))
        return Dispatched(y_ND, plan)
