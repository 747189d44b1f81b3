"""The emergent mixture of experts as a feed-forward of a block.

    y = sum_(e in TopK(x . mean K_e)) activation(x K_e^T + b_e) V_e + c

With K = E it is the dense feed-forward whose units the experts are.

Shapes: B batch, T tokens in a sequence, N = B T tokens, D width, E experts, U inner units of all.
"""

import torch
from torch import Tensor, nn

from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.emoe.experts import MaskedDispatcher, UnitGroups
from polyad.model.emoe.router import EmergentRouter, mean_keys
from polyad.model.initialization import ZEROS, Initializer
from polyad.model.interface import NOTHING_ELSE, BlockInput, FeedForward, FeedForwardContext
from polyad.model.smoe.dispatch import Dispatcher
from polyad.model.smoe.layer import SparseMoE
from polyad.model.smoe.router import Routing
from polyad.model.smoe.selection import Selected


class EmergentMoE(SparseMoE):
    """A sparse mixture whose experts are groups of one feed-forward's units.

    Args:
        config: Its own configuration.
        context: Settings of the model.
    """

    unit: Tensor
    """[U], of each unit, expert by expert, its number in the dense feed-forward."""

    def __init__(self, config: EmergentMoEConfig, context: FeedForwardContext) -> None:
        FeedForward.__init__(self)
        self.config = config.sparse(context.hidden_size)
        self.score = config.score
        self.router = EmergentRouter(config, context)
        self.dispatcher = MaskedDispatcher() if config.experts == "masked" else Dispatcher()
        self.experts = UnitGroups(config, context)
        self.output_bias = nn.Parameter(torch.empty(context.hidden_size)) if context.bias else None
        units = config.inner_size(context.hidden_size)
        self.register_buffer("unit", torch.empty(units, dtype=torch.int64))
        self.dropout = nn.Dropout(context.dropout)

    def initializers(self) -> dict[str, Initializer]:
        """Says how what is its own starts; its parts have initializers."""
        return {"output_bias": ZEROS, "unit": Initializer(_in_order)}

    def route(self, normalized_BTD: Tensor, given: BlockInput = NOTHING_ELSE) -> Routing:
        """Chooses the experts of every token; see `Router.forward`."""
        directions_ED = self.directions() if self.score == "avg_k" else None
        routing: Routing = self.router(normalized_BTD, given, directions_ED)
        return routing

    def directions(self) -> Tensor:
        """The mean key of each expert, of all processes."""
        keys_EFD = self.experts.keys
        assert isinstance(keys_EFD, Tensor)
        return self.dispatcher.of_all_experts(mean_keys(keys_EFD))

    def parameters_by_expert(self) -> list[nn.Parameter]:
        """See `SparseMoE.parameters_by_expert`; the output bias is every token's."""
        return list(self.experts.parameters())

    def add_bias(self, y_ND: Tensor, selected: Selected) -> Tensor:
        """Adds the output bias, once for each token."""
        assert self.output_bias is not None
        return y_ND + self.output_bias

    def gate_columns(self) -> list[Tensor]:
        """The mean keys, or the columns of a learned score."""
        return [self.directions()] if self.score == "avg_k" else super().gate_columns()


def _in_order(value: Tensor, generator: torch.Generator) -> Tensor:
    return value.copy_(torch.arange(len(value)))
