"""The router of an emergent mixture of experts: scores by mean keys, weights of 1.

    score_e = x . mean of the keys of expert e

The keys are those of the moment, so that the gate follows them through training and nothing of it
is stored. They get no gradient through it; the token does, where a loss of routing asks for it.

Shapes: B batch, T tokens in a sequence, N = B T tokens, D width, E experts, K experts of a token.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.initialization import Initializer
from polyad.model.interface import NOTHING_ELSE, BlockInput, FeedForwardContext
from polyad.model.padding import pack
from polyad.model.smoe.router import Router, Routing
from polyad.model.smoe.scores import Score, router_dtype
from polyad.model.smoe.selection import Selected, TopK


class AverageKeys(Score):
    """Scores by the mean keys, which it is given each time: it has no parameters."""

    def initializers(self) -> dict[str, Initializer]:
        """None."""
        return {}

    def columns(self, hidden_EF: Tensor | None = None) -> Tensor:
        """Not to be asked: the layer knows the keys."""
        raise AssertionError("the layer has the keys")

    def forward(self, u_ND: Tensor, directions_ED: Tensor | None = None) -> Tensor:
        """Scores the experts.

        Args:
            u_ND: Tokens.
            directions_ED: Mean keys, in routing's precision.

        Returns:
            Logits [N, E], fp32 at least.
        """
        assert directions_ED is not None
        return linear(u_ND.to(directions_ED.dtype), directions_ED)


class Selection(TopK):
    """The experts with the highest or the lowest logits, and their weights.

    Args:
        config: Of the layer.
        context: Settings of the model.
    """

    def __init__(self, config: EmergentMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(config.sparse(context.hidden_size))
        self.is_learned = config.score != "avg_k"
        self.lowest = config.select != "top_k"  # all but the highest are the lowest

    def forward(self, scores_NE: Tensor, logits_NE: Tensor | None = None) -> Selected:
        """Selects.

        Args:
            scores_NE: Of every expert, each row summing to 1.
            logits_NE: What they are the softmax of, for some of them may have underflowed to 0;
                None: their logarithms.

        Returns:
            Weights and experts, the best first.
        """
        ranked_NE = scores_NE.log() if logits_NE is None else logits_NE
        best = ranked_NE.topk(self.top_k, dim=-1, largest=not self.lowest)
        ids_NK: Tensor = self.agreed(best.indices)
        chosen_NK = ranked_NE.gather(-1, ids_NK)
        weights_NK = torch.ones_like(chosen_NK)
        if self.is_learned:
            weights_NK = self.top_k * chosen_NK.softmax(-1)
        return Selected(weights_NK, ids_NK, self.priority(scores_NE))


class EmergentRouter(Router):
    """Routes by mean keys, or by a learned score.

    Args:
        config: Of the layer.
        context: Settings of the model.
    """

    def __init__(self, config: EmergentMoEConfig, context: FeedForwardContext) -> None:
        sparse = config.sparse(context.hidden_size)
        super().__init__(sparse, context)
        if config.score == "avg_k":
            self.score = AverageKeys(sparse, context)
        self.selection = Selection(config, context)

    def forward(
        self,
        u_BTD: Tensor,
        given: BlockInput = NOTHING_ELSE,
        directions_ED: Tensor | None = None,
    ) -> Routing:
        """Chooses the experts of every token.

        Args:
            u_BTD: The input of the experts.
            given: Which tokens are real.
            directions_ED: Mean keys; None with a learned score.

        Returns:
            Experts and weights of the N tokens that are real, and their statistics.
        """
        u_ND = pack(u_BTD.flatten(0, 1), given.real)
        return self.routing(self.score(u_ND, directions_ED), u_BTD, given)

    def select(self, mixed_NE: Tensor, noisy_NE: Tensor) -> Selected:
        """Selects experts by their logits, which do not underflow; see `Router.select`."""
        selected: Selected = self.selection(mixed_NE, noisy_NE)
        return selected


def mean_keys(keys_EFD: Tensor) -> Tensor:
    """The mean key of each expert [E, D], without gradient, in routing's precision.

    Args:
        keys_EFD: Keys of each expert.
    """
    return keys_EFD.detach().mean(1, dtype=router_dtype(keys_EFD.dtype))
