"""The sparse mixture of experts as a feed-forward of a block.

    y_i = sum_e TopK(p_i)_e g_e(u_i)

Shapes: B batch, T tokens in a sequence, N tokens that are real (B T without padding), D width, E
experts, K experts of a token, F inner width of an expert.
"""

import torch
from torch import Tensor, nn

from polyad.model.initialization import ZEROS, Initializer
from polyad.model.interface import NOTHING_ELSE, BlockInput, FeedForward, FeedForwardContext
from polyad.model.output import RoutingStats
from polyad.model.padding import pack, unpack
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.dispatch import Dispatcher
from polyad.model.smoe.experts import Experts
from polyad.model.smoe.router import Router, Routing
from polyad.model.smoe.selection import Selected, spread


class SparseMoE(FeedForward):
    """A router, a dispatcher and experts.

    Args:
        config: Its own configuration.
        context: Settings of the model.
    """

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config, context)
        self.dispatcher = Dispatcher()
        self.experts = Experts(config, context)
        self.output_bias = (
            nn.Parameter(torch.empty(config.num_experts, context.hidden_size))
            if context.bias
            else None
        )
        self.dropout = nn.Dropout(context.dropout)

    def initializers(self) -> dict[str, Initializer]:
        """Says how its own parameter starts; its parts have initializers."""
        return {"output_bias": ZEROS.each_expert()} if self.output_bias is not None else {}

    def attention_head(self) -> Tensor | None:
        """See `FeedForward.attention_head`."""
        return self.router.graph.attention_head()

    def forward(
        self,
        normalized_BTD: Tensor,
        residual_BTD: Tensor,
        given: BlockInput = NOTHING_ELSE,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Routes and computes the normalized input; see `FeedForward.forward`."""
        selected, stats = self.route(normalized_BTD, given)
        capacity_factor = self.config.capacity(self.training)
        y_ND, plan = self.dispatcher(
            pack(normalized_BTD.flatten(0, 1), given.real), selected, self.experts, capacity_factor
        )
        weights_NK = selected.weights_NK
        if plan is not None and plan.drops:
            kept_A = plan.kept_M()[plan.row_A]
            weights_NK = weights_NK * kept_A.view_as(weights_NK)
            stats = stats.but(dropped=1 - kept_A.to(stats.load_E.dtype).mean())
        if self.output_bias is not None:
            y_ND = self.add_bias(y_ND, selected._replace(weights_NK=weights_NK))
        return self.dropout(unpack(y_ND, given.real).view_as(normalized_BTD)), stats

    def route(self, normalized_BTD: Tensor, given: BlockInput = NOTHING_ELSE) -> Routing:
        """Chooses the experts of every token; see `Router.forward`."""
        routing: Routing = self.router(normalized_BTD, given, self.hidden_means())
        return routing

    def hidden_means(self) -> Tensor | None:
        """What the score reads of the hidden layers [E, F], of the experts of all processes."""
        mean_ED = self.router.score.mean_inputs()
        return None if mean_ED is None else self.dispatcher.hidden(mean_ED, self.experts)

    def add_bias(self, y_ND: Tensor, selected: Selected) -> Tensor:
        """Adds the output bias.

        Args:
            y_ND: The sum over experts without it.
            selected: Of each token, with weights of 0 where an assignment was dropped.
        """
        assert self.output_bias is not None
        # sum_k weight_nk bias_(e_nk), as one product with the weights of all experts.
        weights_NE = spread(selected, self.config.num_experts)
        return torch.addmm(y_ND, weights_NE.to(y_ND.dtype), self.output_bias)

    def parameters_by_expert(self) -> list[nn.Parameter]:
        """Parameters [E, ...] of which a token uses those of its experts alone."""
        experts = list(self.experts.parameters())
        return experts if self.output_bias is None else [*experts, self.output_bias]

    def gate_columns(self) -> list[Tensor]:
        """The columns of the score, [E, D]: there is one level of experts."""
        return [self.router.score.columns(self.hidden_means())]

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            stats: Of this layer, averaged over the step.
            progress: Share of the run's steps that are done.
        """
        self.router.update(stats, progress)
