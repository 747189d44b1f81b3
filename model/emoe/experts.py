"""Experts that are groups of the inner units of one dense feed-forward.

    y = sum over the experts e of a token: activation(x K_e^T + b_e) V_e

The keys K are the rows of the dense feed-forward's first matrix, the values V the columns of its
second one.

Shapes: N tokens, E experts, D width, F inner units of one expert, U = E F of all.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.feedforward import ACTIVATIONS, FeedForwardContext
from polyad.model.initialization import ZEROS, Initializer, normal
from polyad.model.smoe.dispatch import Dispatcher, Plan, make_plan
from polyad.model.smoe.experts import ExpertWeights, StackedExperts
from polyad.model.smoe.selection import Selected, spread


class UnitGroups(StackedExperts):
    """E groups of units: keys, an activation as in the dense feed-forward, values.

    Args:
        config: The layer's configuration.
        context: Settings of the model.
    """

    inner_axes: ClassVar[dict[str, int]] = {"keys": 1, "bias": 1, "values": 1}

    def __init__(self, config: EmergentMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(config, context, activation=context.activation)
        experts, width = config.num_experts, context.hidden_size
        inner = config.inner_size(width) // experts
        self.keys = nn.Parameter(torch.empty(experts, inner, width))
        self.bias = nn.Parameter(torch.empty(experts, inner)) if context.bias else None
        self.values = nn.Parameter(torch.empty(experts, inner, width))
        self.dense_activation = ACTIVATIONS[context.activation]()

    def initializers(self) -> dict[str, Initializer]:
        """Says how each parameter starts, expert by expert; see `model/initialization.py`."""
        entries = {
            "keys": normal(self.context.initializer_std).each_expert(),
            "values": normal(self.context.residual_std).each_expert(),
        }
        return entries | ({"bias": ZEROS.each_expert()} if self.bias is not None else {})

    def stacked(self) -> ExpertWeights:
        """See `StackedExperts.stacked`."""
        return ExpertWeights(self.keys.transpose(1, 2), self.bias, self.values)

    def masked(self, tokens_ND: Tensor, weights_NE: Tensor) -> Tensor:
        """All units of all tokens in one product; what a token does not use is multiplied by 0.

        Args:
            tokens_ND: Tokens.
            weights_NE: The weights of every expert.

        Returns:
            [N, D].
        """
        bias_U = None if self.bias is None else self.bias.flatten()
        inner_NU = self.dense_activation(linear(tokens_ND, self.keys.flatten(0, 1), bias_U))
        inner_NEF = inner_NU.view(-1, *self.keys.shape[:2]) * weights_NE.unsqueeze(-1)
        output_ND: Tensor = inner_NEF.flatten(1) @ self.values.flatten(0, 1)
        return output_ND


class MaskedDispatcher(Dispatcher):
    """No token goes anywhere: every expert sees all of them."""

    def forward(
        self,
        tokens_ND: Tensor,
        selected: Selected,
        experts: StackedExperts,
        capacity_factor: float | None = None,
    ) -> tuple[Tensor, Plan | None]:
        """See `Dispatcher.forward`; a plan there is only where a capacity may drop assignments."""
        assert isinstance(experts, UnitGroups)
        tokens_ND = self.regions.tokens(tokens_ND)
        selected = selected._replace(weights_NK=self.regions.weights(selected.weights_NK))
        plan = None
        if capacity_factor is not None:
            plan = make_plan(
                selected.expert_ids_NK, selected.counts_E, capacity_factor, selected.priority_N
            )
            kept_NK = plan.kept_M()[plan.row_A].view_as(selected.weights_NK)
            selected = selected._replace(weights_NK=selected.weights_NK * kept_NK)
        weights_NE = spread(selected, experts.config.num_experts).to(tokens_ND.dtype)
        return self.regions.output(experts.masked(tokens_ND, weights_NE)), plan
