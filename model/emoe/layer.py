"""The emergent mixture of experts as a feed-forward of a block, built from parts of smoe.

    y = sum_(e in TopK(x . mean K_e)) activation(x K_e^T + b_e) V_e + c

With K = E it equals the dense feed-forward whose units the experts are.

Shapes: N tokens, D width, E experts, K experts of a token, F inner units of one expert, U of all.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.emoe.experts import MaskedDispatcher, UnitGroups
from polyad.model.feedforward import FeedForwardContext
from polyad.model.initialization import ZEROS, Initializer
from polyad.model.smoe.dispatch import Dispatcher
from polyad.model.smoe.experts import StackedExperts
from polyad.model.smoe.graph import NoGraph
from polyad.model.smoe.layer import Router, SelectingMoE
from polyad.model.smoe.scores import CosineScore, LinearScore, Score, router_dtype
from polyad.model.smoe.selection import Selected, Selection


class AverageKeys(Score):
    """Scores by the mean key of each expert, x . mean K_e; it has no parameters.

    The means are computed from the current keys, so the gate follows them in training and nothing
    is stored. The keys get no gradient from it; the tokens do, if a routing loss requires it.
    """

    def features(self, experts: StackedExperts, dispatcher: Dispatcher) -> Tensor:
        """Computes the mean key of each expert, without gradient."""
        assert isinstance(experts, UnitGroups)
        keys_EFD = experts.keys.detach()
        return dispatcher.unit_means(keys_EFD.mean(1, dtype=router_dtype(keys_EFD.dtype)))

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Returns the mean keys."""
        assert features is not None
        return features

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`; `features` are mean keys [E, D], in routing's precision."""
        assert features is not None
        return linear(u_ND.to(features.dtype), features)


class UnitSelection(Selection):
    """Selects the experts with the highest or lowest logits; weights are 1, or 1 on average.

    Args:
        config: The layer's configuration.
    """

    def __init__(self, config: EmergentMoEConfig) -> None:
        super().__init__(config)
        self.is_learned = config.weighs_experts()
        self.lowest = config.select != "top_k"  # not_top_k takes the lowest, too

    def forward(self, scores_NE: Tensor, logits_NE: Tensor | None = None) -> Selected:
        """See `Selection.forward`; uses logits, since some scores may have underflowed to 0."""
        ranked_NE = scores_NE.log() if logits_NE is None else logits_NE
        best = ranked_NE.topk(self.top_k, dim=-1, largest=not self.lowest)
        ids_NK = self.forced(self.agreed(best.indices))
        chosen_NK = ranked_NE.gather(-1, ids_NK)
        weights_NK = torch.ones_like(chosen_NK)
        if self.is_learned:
            weights_NK = self.top_k * chosen_NK.softmax(-1)
        return Selected.of(weights_NK, ids_NK, self.num_experts)


class EmergentMoE(SelectingMoE):
    """A mixture whose experts are groups of the units of one feed-forward.

    Args:
        config: Its own configuration.
        context: Settings of the model.
    """

    config: EmergentMoEConfig
    experts: UnitGroups
    unit: Tensor
    """[U], the index in the dense feed-forward of each unit, expert by expert."""

    def __init__(self, config: EmergentMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(
            config,
            context,
            router=_make_router(config, context),
            dispatcher=MaskedDispatcher() if config.experts == "masked" else Dispatcher(),
            experts=UnitGroups(config, context),
        )
        self.output_bias = nn.Parameter(torch.empty(context.hidden_size)) if context.bias else None
        units = config.inner_size(context.hidden_size)
        self.register_buffer("unit", torch.empty(units, dtype=torch.int64))

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers of its own parameters; its parts have their own."""
        return {"output_bias": ZEROS, "unit": Initializer(_in_order)}

    def add_bias(self, y_ND: Tensor, selected: Selected) -> Tensor:
        """Adds the output bias, once per token."""
        assert self.output_bias is not None
        return y_ND + self.output_bias

    def parameters_by_expert(self) -> list[nn.Parameter]:
        """Returns the experts' weights; the output bias belongs to all tokens."""
        return list(self.experts.parameters())


def _make_router(config: EmergentMoEConfig, context: FeedForwardContext) -> Router:
    score: Score = AverageKeys(context.initializer_std)
    if config.score != "avg_k":
        learned: dict[str, Callable[..., Score]] = {"linear": LinearScore, "cosine": CosineScore}
        score = learned[config.score](config, context)
    noise_std = config.router_noise / config.num_experts
    return Router(score, NoGraph(), UnitSelection(config), noise_std)


def _in_order(value: Tensor, generator: torch.Generator) -> Tensor:
    return value.copy_(torch.arange(len(value)))
