"""The router: a base score, mixed over a graph of tokens, of which the K highest are selected.

Shapes: B batch, T tokens in a sequence, N tokens that are real (B T without padding), D width, E
experts, K experts of a token, F inner width of an expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from polyad.model.interface import NOTHING_ELSE, BlockInput, FeedForwardContext
from polyad.model.output import RoutingStats
from polyad.model.padding import counted, pack, unpack
from polyad.model.samples import SampleStatistics
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.graph import GRAPHS
from polyad.model.smoe.losses import (
    importance_loss,
    load,
    load_balance_loss,
    load_loss,
    mean_entropy,
    router_z_loss,
)
from polyad.model.smoe.scores import SCORES, expert_input
from polyad.model.smoe.selection import Selected, TopK


class Routing(NamedTuple):
    """The output of a router."""

    selected: Selected
    stats: RoutingStats
    """The statistics, with an empty name."""


class Router(SampleStatistics):
    """A router with any score and any graph.

    Args:
        config: Of the layer.
        context: Settings of the model.
    """

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__()
        self.score = SCORES[config.score](config, context)
        self.graph = GRAPHS[config.graph](config, context)
        self.selection = TopK(config)
        self.noise_std = config.router_noise / config.num_experts

    def forward(
        self,
        u_BTD: Tensor,
        given: BlockInput = NOTHING_ELSE,
        hidden_EF: Tensor | None = None,
    ) -> Routing:
        """Chooses the experts of every token.

        Args:
            u_BTD: The input of the experts.
            given: What else there is, for the graph.
            hidden_EF: Of the experts, if the score asks for it; see `Score.forward`.

        Returns:
            Experts and weights of the N tokens that are real, and their statistics.
        """
        logits_NE = self.score(pack(u_BTD.flatten(0, 1), given.real), hidden_EF)
        return self.routing(logits_NE, u_BTD, given)

    def routing(
        self, logits_NE: Tensor, u_BTD: Tensor, given: BlockInput = NOTHING_ELSE
    ) -> Routing:
        """Chooses the experts of every token by given logits; see `forward`.

        Args:
            logits_NE: Of the experts, from each token alone.
            u_BTD: The input of the experts.
            attention: The trace of the block's attention, if the graph needs it.
            cache: In generation: the graph's features and scores of earlier tokens.
            real: The tokens that are not padding, which the logits are of; None: all.
        """
        real = given.real
        clean_NE = scores_NE = logits_NE.softmax(-1)
        noisy_NE, load_term = logits_NE, None
        if self.training and self.noise_std:
            # Of the default generator: every tensor-parallel process draws the same, and
            # recomputation draws it again.
            noisy_NE = logits_NE + self.noise_std * torch.randn_like(logits_NE)
            scores_NE = noisy_NE.softmax(-1)
            load_term = load_loss(logits_NE, noisy_NE, self.noise_std, self.selection.top_k)
        scores_BTE = unpack(scores_NE, real).view(*u_BTD.shape[:2], -1)
        mixed = self.graph(scores_BTE, u_BTD, given)
        mixed_NE = pack(mixed.scores_BTE.flatten(0, 1), real)
        selected = self.select(mixed_NE, noisy_NE)
        load_E = load(selected.expert_ids_NK, mixed_NE.shape[1], mixed_NE.dtype)
        expert_input_ED = None
        if self.training and self.score.mean_inputs() is not None:
            u_ND = pack(u_BTD.flatten(0, 1), real)
            expert_input_ED = expert_input(u_ND, selected.expert_ids_NK, len(load_E))
        stats = RoutingStats(
            name="",
            load_E=load_E,
            usage_E=mixed_NE.detach().mean(0),
            entropy=mean_entropy(mixed_NE.detach()),
            balance_loss=load_balance_loss(mixed_NE, load_E),
            z_loss=router_z_loss(logits_NE),
            importance_loss=importance_loss(clean_NE),
            load_loss=load_term,
            dropped=load_E.new_zeros(()),
            effective_neighbours=mixed.effective_neighbours,
            head_entropy_A=mixed.head_entropy_A,
            attention_head=mixed.attention_head,
            expert_input_ED=expert_input_ED,
            tokens=None if real is None else counted(real, mixed_NE.dtype),
        )
        return Routing(selected, self.with_samples(stats, [clean_NE], u_BTD, real))

    def select(self, mixed_NE: Tensor, noisy_NE: Tensor) -> Selected:
        """Selects experts.

        Args:
            mixed_NE: Scores after the graph, each row summing to 1.
            noisy_NE: Logits before the graph, with their noise.
        """
        selected: Selected = self.selection(mixed_NE)
        return selected

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            stats: Averaged over the step.
            progress: Share of the run's steps that are done.
        """
        self.selection.update(stats.load_E, progress)
        self.graph.update(stats.head_entropy_A, progress)
        self.score.update(stats)
