"""The sparse mixture of experts as a feed-forward of a block: a router, a dispatcher and experts.

    y_i = sum_e TopK(p_i)_e g_e(u_i)

Shapes: B batch, T tokens in a sequence, N real tokens (B T without padding), D width, E experts, K
experts of a token.
"""

import dataclasses
from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.feedforward import (
    NOTHING_ELSE,
    BlockInput,
    DenseFeedForward,
    DenseFeedForwardConfig,
    FeedForward,
    FeedForwardContext,
)
from polyad.model.initialization import ZEROS, Initializer, linear_initializers
from polyad.model.output import RoutingStats, StatisticsModule, entropy, mean_of_samples
from polyad.model.padding import RealTokens, counted, pack, unpack
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig
from polyad.model.smoe.dispatch import Dispatched, Dispatcher
from polyad.model.smoe.experts import Experts, StackedExperts
from polyad.model.smoe.graph import GRAPHS, Graph
from polyad.model.smoe.losses import (
    importance_loss,
    load_balance_loss,
    load_loss,
    router_z_loss,
    sequence_balance_loss,
)
from polyad.model.smoe.pool import Pool, within
from polyad.model.smoe.scores import SCORES, Score
from polyad.model.smoe.selection import Selected, Selection, TopK, spread


class Routing(NamedTuple):
    """The output of a router."""

    selected: Selected
    stats: RoutingStats
    """The statistics, with an empty name."""


class Router(StatisticsModule):
    """Scores each token, mixes the scores over a graph of tokens, and selects experts by them.

    Args:
        score: The base score.
        graph: The graph of tokens.
        selection: The selection of experts.
        noise_std: Standard deviation of the noise on logits in training; 0 adds none.
        by_sigmoid: Whether scores are sigmoids of the logits, rather than their softmax. Statistics
            and losses then use them divided by their sum.
        pool: The experts that tokens can use in training; None for all.
    """

    def __init__(
        self,
        score: Score,
        graph: Graph,
        selection: Selection,
        noise_std: float = 0.0,
        *,
        by_sigmoid: bool = False,
        pool: Pool | None = None,
    ) -> None:
        super().__init__()
        self.score, self.graph, self.selection, self.pool = score, graph, selection, pool
        self.noise_std, self.by_sigmoid = noise_std, by_sigmoid

    def scored(self, logits_NE: Tensor) -> Tensor:
        """Computes the scores of logits [N, E]."""
        return logits_NE.sigmoid() if self.by_sigmoid else logits_NE.softmax(-1)

    def forward(
        self, u_BTD: Tensor, given: BlockInput = NOTHING_ELSE, features: Tensor | None = None
    ) -> Routing:
        """Selects the experts of every token.

        Args:
            u_BTD: The input of the experts.
            given: Further inputs, for the graph.
            features: Values of the experts that the score reads; see `Score.features`.

        Returns:
            Experts and weights of the N real tokens, and statistics.
        """
        real = given.real
        u_ND = pack(u_BTD.flatten(0, 1), real)
        logits_NE = noisy_NE = self.score(u_ND, features)
        own_NE = scores_NE = self.scored(logits_NE)
        if self.training and self.noise_std:
            # From the default generator: every tensor-parallel rank draws the same numbers, and
            # recomputation draws them again.
            noisy_NE = logits_NE + self.noise_std * torch.randn_like(logits_NE)
            scores_NE = self.scored(noisy_NE)
        scores_BTE = unpack(scores_NE, real).view(*u_BTD.shape[:2], -1)
        mixed = self.graph(scores_BTE, u_BTD, given)
        mixed_NE = scores_NE
        if mixed.scores_BTE is not scores_BTE:
            mixed_NE = pack(mixed.scores_BTE.flatten(0, 1), real)
        if self.pool is not None and self.training:
            pooled_BTE = unpack(mixed_NE, real).view_as(scores_BTE)
            pool_NE = pack(self.pool(pooled_BTE, given.document_start_BT).flatten(0, 1), real)
            mixed_NE = within(mixed_NE, pool_NE)
        is_own = mixed_NE is scores_NE and noisy_NE is logits_NE
        selected: Selected = self.selection(mixed_NE, noisy_NE)
        shares_NE = mixed_NE
        if self.by_sigmoid:
            shares_NE = mixed_NE / mixed_NE.sum(-1, keepdim=True)
            own_NE = shares_NE if is_own else own_NE / own_NE.sum(-1, keepdim=True)
        usage_E = None
        if self.needs("usage_E") or self.needs("balance_loss"):
            usage_E = shares_NE.mean(0)
        load_E = selected.load(shares_NE.dtype)
        stats = RoutingStats(
            name="",
            load_E=load_E,
            usage_E=None if usage_E is None else self.for_loss("usage_E", usage_E),
            entropy=entropy(shares_NE.detach()).mean() if self.measures else None,
            dropped=load_E.new_zeros(()) if self.measures else None,
            effective_neighbours=mixed.effective_neighbours,
            head_entropy_A=mixed.head_entropy_A,
            attention_head=mixed.attention_head,
            tokens=None if real is None else counted(real, load_E.dtype),
        )
        if self.training:
            own_E = usage_E if is_own else None
            stats = stats.but(**self._losses(logits_NE, noisy_NE, own_NE, own_E, usage_E, load_E))
            if "sequence_loss" in self.learns_from:
                stats = stats.but(sequence_loss=self._of_sequences(own_NE, u_BTD, real))
        return Routing(selected, self.with_samples(stats, [own_NE], u_BTD, real))

    def _losses(
        self,
        logits_NE: Tensor,
        noisy_NE: Tensor,
        own_NE: Tensor,
        own_E: Tensor | None,
        usage_E: Tensor | None,
        load_E: Tensor,
    ) -> dict[str, Tensor]:
        """Computes the auxiliary losses that are needed.

        `own_NE` are the scores without noise and graph, and `own_E` is their mean, if known.
        """
        losses = {}
        if usage_E is not None and self.needs("balance_loss"):
            usage_E = self.for_loss("balance_loss", usage_E)
            losses["balance_loss"] = load_balance_loss(usage_E, load_E)
        if self.needs("z_loss"):
            losses["z_loss"] = router_z_loss(self.for_loss("z_loss", logits_NE))
        if self.needs("importance_loss"):
            own_E = own_NE.mean(0) if own_E is None else own_E
            losses["importance_loss"] = importance_loss(self.for_loss("importance_loss", own_E))
        if noisy_NE is not logits_NE and self.needs("load_loss"):
            losses["load_loss"] = load_loss(
                self.for_loss("load_loss", logits_NE),
                self.for_loss("load_loss", noisy_NE),
                self.noise_std,
                self.selection.top_k,
            )
        return losses

    def _of_sequences(self, own_NE: Tensor, u_BTD: Tensor, real: RealTokens | None) -> Tensor:
        """Computes the balance loss within sequences, without noise, graph, groups and bias."""
        top_k = self.selection.top_k
        best_NK = self.selection.agreed(own_NE.detach().topk(top_k, dim=-1).indices)
        chosen_NE = torch.zeros_like(own_NE).scatter(1, best_NK, 1)
        chosen_BE = mean_of_samples(chosen_NE, u_BTD, real)
        return sequence_balance_loss(chosen_BE, mean_of_samples(own_NE, u_BTD, real), top_k)

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            stats: The layer's statistics, averaged over the step.
            progress: Fraction of the run's steps that are done.
        """
        self.selection.update(stats.load_E, progress)
        self.graph.update(stats.head_entropy_A)


def make_router(config: SparseMoEConfig, context: FeedForwardContext) -> Router:
    """Builds the router of a sparse mixture, with its score and its graph.

    Args:
        config: The layer's configuration.
        context: Settings of the model.
    """
    return Router(
        SCORES[config.score](config, context),
        GRAPHS[config.graph](config, context),
        TopK(config),
        config.router_noise / config.num_experts,
        by_sigmoid=config.score_function == "sigmoid",
        pool=None if config.pool == "none" else Pool(config),
    )


class SelectingMoE(FeedForward):
    """The base class of feed-forwards whose router selects whole experts for each token.

    Args:
        config: The layer's configuration.
        context: Settings of the model.
        router: Selects the experts.
        dispatcher: Sends tokens to experts; expert parallelism replaces it.
        experts: The experts.
    """

    output_bias: nn.Parameter | None
    """The bias that is added to the sum over experts."""

    def __init__(
        self,
        config: SelectingConfig,
        context: FeedForwardContext,
        *,
        router: Router,
        dispatcher: Dispatcher,
        experts: StackedExperts,
    ) -> None:
        super().__init__()
        self.config = config
        self.router, self.dispatcher, self.experts = router, dispatcher, experts
        self.shared: DenseFeedForward | None = None
        """The shared experts, which every token passes through."""
        self.shared_gate: nn.Linear | None = None
        """The sigmoid of its output, one number per token, multiplies the output of `shared`."""
        self.dropout = nn.Dropout(context.dropout)

    def attention_head(self) -> Tensor | None:
        """See `FeedForward.attention_head`."""
        return self.router.graph.attention_head()

    def forward(
        self,
        normalized_BTD: Tensor,
        residual_BTD: Tensor,
        given: BlockInput = NOTHING_ELSE,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Routes and processes the normalized input; see `FeedForward.forward`."""
        selected, stats = self.router(normalized_BTD, given, self.expert_features())
        done: Dispatched = self.dispatcher(
            pack(normalized_BTD.flatten(0, 1), given.real),
            selected,
            self.experts,
            self.config.capacity(self.training),
        )
        y_ND, kept_NK = done.y_ND, None
        if (plan := done.plan) is not None and plan.drops:
            kept_NK = plan.kept_M()[plan.row_A].view_as(selected.weights_NK)
            if self.router.measures:
                stats = stats.but(dropped=1 - kept_NK.to(stats.load_E.dtype).mean())
        if self.output_bias is not None:
            weights_NK = selected.weights_NK if kept_NK is None else selected.weights_NK * kept_NK
            y_ND = self.add_bias(y_ND, selected._replace(weights_NK=weights_NK))
        y_BTD = self.dropout(unpack(y_ND, given.real).view_as(normalized_BTD))
        if self.shared is not None:
            shared_BTD, _ = self.shared(normalized_BTD, residual_BTD)
            if self.shared_gate is not None:
                shared_BTD = torch.sigmoid(self.shared_gate(normalized_BTD)) * shared_BTD
            y_BTD = y_BTD + shared_BTD
        return y_BTD, stats

    def expert_features(self) -> Tensor | None:
        """Returns the values of all ranks' experts that the score reads; see `Score.features`."""
        return self.router.score.features(self.experts, self.dispatcher)

    @abstractmethod
    def add_bias(self, y_ND: Tensor, selected: Selected) -> Tensor:
        """Adds the output bias.

        Args:
            y_ND: The sum over experts without it.
            selected: The experts of each token, with weight 0 for dropped assignments.
        """

    @abstractmethod
    def parameters_by_expert(self) -> list[nn.Parameter]:
        """Returns parameters [E, ...] of which a token only uses the slices of its experts."""

    def gate_columns(self) -> list[Tensor]:
        """Returns the columns of the score, [E, D]: there is one level of experts."""
        return [self.router.score.columns(self.expert_features())]

    def update(self, stats: RoutingStats, progress: float) -> None:
        """See `FeedForward.update`."""
        self.router.update(stats, progress)


def shared_feed_forward(units: int, context: FeedForwardContext) -> DenseFeedForward:
    """Builds the shared experts, a feed-forward that every token passes through.

    Args:
        units: Its inner width.
        context: Settings of the model.
    """
    return DenseFeedForward(DenseFeedForwardConfig(hidden_size=units), context)


class SparseMoE(SelectingMoE):
    """A mixture of MLPs.

    Args:
        config: Its own configuration.
        context: Settings of the model.
    """

    config: SparseMoEConfig
    experts: Experts

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(
            config,
            context,
            router=make_router(config, context),
            dispatcher=Dispatcher(),
            experts=Experts(config, context),
        )
        shape = config.num_experts, context.hidden_size
        self.output_bias = nn.Parameter(torch.empty(shape)) if context.bias else None
        if config.shared_hidden_size is not None:
            of_shared = dataclasses.replace(context, activation=config.activation)
            self.shared = shared_feed_forward(config.shared_hidden_size, of_shared)
            if config.shared_gate:
                self.shared_gate = nn.Linear(context.hidden_size, 1, bias=False)
        self._std = context.initializer_std

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers of its own parameters; its parts have their own."""
        entries = {} if self.output_bias is None else {"output_bias": ZEROS.each_expert()}
        if self.shared_gate is not None:
            entries |= linear_initializers("shared_gate", self.shared_gate, self._std)
        return entries

    def add_bias(self, y_ND: Tensor, selected: Selected) -> Tensor:
        """Adds the biases of a token's experts, weighted like their outputs."""
        assert self.output_bias is not None
        # sum_k weight_nk bias_(e_nk), as one product with the weights of all experts.
        weights_NE = spread(selected, self.config.num_experts)
        return torch.addmm(y_ND, weights_NE.to(y_ND.dtype), self.output_bias)

    def parameters_by_expert(self) -> list[nn.Parameter]:
        """Returns the experts' weights, and their output biases."""
        experts = list(self.experts.parameters())
        return experts if self.output_bias is None else [*experts, self.output_bias]
