"""Base scores: logits over the experts, computed from each token alone.

To add a score, write a class here and add a line to `SCORES` and a name to `ScoreName`.

Shapes: N tokens, D width, E experts, K experts of a token, S width of the cosine and attentive
scores' space, F inner width of an expert.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import linear, normalize

from polyad.model.feedforward import FeedForwardContext
from polyad.model.initialization import ZEROS, Initializer, constant, normal, uniform
from polyad.model.output import RoutingStats
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig
from polyad.model.smoe.dispatch import Dispatcher
from polyad.model.smoe.experts import Experts, StackedExperts

INITIAL_TEMPERATURE = 0.07
"""Initial temperature of the cosine score, as in X-MoE (Chi et al. 2022, section 3.2)."""
LEAST_VARIANCE = 1e-12
"""Variance below which the sparsity score treats inner units as equal."""
INPUT_MOMENTUM = 0.99
"""Momentum of an expert's mean input in a step in which tokens selected it."""


def router_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the precision of routing: fp32, or the model's if higher."""
    return torch.promote_types(dtype, torch.float32)


class NoColumnsError(ValueError):
    """A score has no directions that raise the logits of experts."""


class Score(nn.Module, ABC):
    """The interface of a base score.

    Args:
        std: Standard deviation of initial weights.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of each parameter; see `model/initialization.py`."""
        return {}

    @abstractmethod
    def columns(self, features: Tensor | None = None) -> Tensor:
        """Returns the directions of a token that raise each expert's logit, [E, D].

        Args:
            features: As in `forward`.

        Raises:
            NoColumnsError: There are none.
        """

    def mean_inputs(self) -> Tensor | None:
        """Returns the input [E, D] at which the score needs each expert's hidden layer; None if it
        does not need it. The result changes only in `update`."""
        return None

    def features(self, experts: StackedExperts, dispatcher: Dispatcher) -> Tensor | None:
        """Computes the values of the experts that `forward` reads; by default none.

        Args:
            experts: The experts, or this rank's part of them.
            dispatcher: Exchanges values with other ranks.

        Returns:
            [E, ...], for the experts of all ranks; None if nothing is read.
        """
        return None

    @abstractmethod
    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """Scores the experts.

        Args:
            u_ND: Tokens.
            features: The result of `features`.

        Returns:
            Logits [N, E], at least fp32; their softmax is r.
        """

    def rows(self) -> Tensor | None:
        """Returns the learned rows [E, D] that multiply tokens; None if there are none."""
        return None

    def active_shares(self, logits_NE: Tensor) -> Tensor | None:
        """Returns the share of each expert's inner units that is expected to be above 0, [N, E].

        Args:
            logits_NE: The score's logits.

        Returns:
            The shares; None for a score without such an expectation.
        """
        return None

    def update(self, stats: RoutingStats) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            stats: This layer's statistics, averaged over the step.
        """


class LinearScore(Score):
    """Logits W u + b (Shazeer et al. 2017)."""

    def __init__(self, config: SelectingConfig, context: FeedForwardContext) -> None:
        super().__init__(context.initializer_std)
        self.weight = nn.Parameter(torch.empty(config.num_experts, context.hidden_size))
        has_bias = context.bias and config.scores_have_bias()
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if has_bias else None
        self.in_model_dtype = config.scores_in_model_dtype()

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers: normal weight, zero bias."""
        entries = {"weight": normal(self.std)}
        return entries | ({"bias": ZEROS} if self.bias is not None else {})

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Returns the weight."""
        return self.weight

    def rows(self) -> Tensor | None:
        """See `Score.rows`; includes an adapter."""
        return self.columns()

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        if self.in_model_dtype:
            return linear(u_ND, self.weight, self.bias).to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return linear(u_ND.to(dtype), self.weight.to(dtype), bias)


class CosineScore(Score):
    """Cosine of the projected token and an embedding per expert, divided by a learned temperature.

    Source: Chi et al. 2022, "On the representation collapse of sparse mixture of experts" (X-MoE).
    """

    def __init__(self, config: SelectingConfig, context: FeedForwardContext) -> None:
        super().__init__(context.initializer_std)
        size = config.score_size()
        self.projection = nn.Parameter(torch.empty(size, context.hidden_size))
        self.embedding = nn.Parameter(torch.empty(config.num_experts, size))
        self.temperature = nn.Parameter(torch.empty(1))  # DeepSpeed rejects scalar parameters

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers: normal directions, and X-MoE's temperature."""
        return {
            "projection": normal(self.std),
            "embedding": normal(self.std),
            "temperature": constant(INITIAL_TEMPERATURE),
        }

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Returns each expert's direction mapped back through the projection: the weight that gives
        the cosine before the division by the token's length.
        """
        dtype = router_dtype(self.embedding.dtype)
        directions_ES = normalize(self.embedding.to(dtype), dim=-1)
        return directions_ES @ self.projection.to(dtype)

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        projected_NS = normalize(linear(u_ND.to(dtype), self.projection.to(dtype)), dim=-1)
        directions_ES = normalize(self.embedding.to(dtype), dim=-1)
        # A learned temperature must not reach zero.
        temperature = self.temperature.to(dtype).clamp_min(0.01)
        return linear(projected_NS, directions_ES) / temperature


class RandomScore(Score):
    """A linear score that is never trained.

    Its weight is a buffer: part of a checkpoint, not of the optimizer. Source: Chen et al. 2023,
    "Sparse MoE as the new dropout" (SMoE-dropout).
    """

    weight: Tensor

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(context.initializer_std)
        self.bound = context.hidden_size**-0.5
        self.register_buffer("weight", torch.empty(config.num_experts, context.hidden_size))

    def initializers(self) -> dict[str, Initializer]:
        """Returns PyTorch's uniform initializer of linear layers."""
        return {"weight": uniform(self.bound)}

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Returns the weight."""
        return self.weight

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        return linear(u_ND.to(dtype), self.weight.to(dtype))


class AttentiveScore(Score):
    """Inner products of a token's query and the experts' keys, divided by the root of their width:

        logits = (u W_q) k^T / sqrt(S)

    The paper's keys are k = h W_k, where h is the hidden layer of every expert, before its ReLU,
    for the current input: every expert runs for every input. Here, unlike in the paper, h is the
    same for all tokens, so that an expert only runs for the tokens that select it. Either k itself
    is learned (`expert_keys: learned`), or h is the mean of the expert's hidden layer, before its
    activation, over tokens that selected it in earlier steps (`hidden_means`). That layer is linear
    before the activation, so the mean equals the layer applied to the mean token: a buffer holds a
    moving average of that token over steps, and h follows the expert's weights. h gets no gradient:
    W_q and W_k learn. The scale also uses S instead of the hidden layer's width.

    The buffer is initialized to a random token per expert, of unit variance as after LayerNorm:
    with zeros all keys would be equal, and every token would select the same experts.

    Given the keys, the logits are linear in u: `columns` returns the equivalent linear score.
    Source: Krishnamurthy et al. 2023, "Improving expert specialization in mixture of experts".
    """

    mean_input: Tensor

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(context.initializer_std)
        experts, width, size = config.num_experts, context.hidden_size, config.score_size()
        self.follows = config.expert_keys == "hidden_means"
        self.query = nn.Parameter(torch.empty(size, width))
        if self.follows:
            self.key_projection = nn.Parameter(torch.empty(size, config.inner_size(width)))
            self.register_buffer("mean_input", torch.empty(experts, width))
        else:
            self.key = nn.Parameter(torch.empty(experts, size))

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers: normal; learned keys with a standard deviation of 1, for which
        initial logits are as large as those of a linear score.
        """
        return {
            "query": normal(self.std),
            "key": normal(1.0),
            "key_projection": normal(self.std),
            "mean_input": normal(1.0),
        }

    def mean_inputs(self) -> Tensor | None:
        """See `Score.mean_inputs`."""
        return self.mean_input if self.follows else None

    def features(self, experts: StackedExperts, dispatcher: Dispatcher) -> Tensor | None:
        """Computes hidden layers [E, F] at `mean_inputs`, if keys need them; without gradient."""
        mean_ED = self.mean_inputs()
        if mean_ED is None:
            return None
        assert isinstance(experts, Experts)
        return dispatcher.hidden(mean_ED, experts)

    def keys(self, hidden_EF: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Computes the keys divided by the root of their width, [E, S].

        Args:
            hidden_EF: Each expert's hidden layer at `mean_inputs`, before its activation and
                without gradient; None if keys are learned.
            dtype: The precision of the result.
        """
        if not self.follows:
            key_ES = self.key.to(dtype)
        else:
            assert hidden_EF is not None
            key_ES = linear(hidden_EF.to(dtype), self.key_projection.to(dtype))
        return key_ES / math.sqrt(key_ES.shape[1])

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Returns the weight of the equivalent linear score."""
        dtype = router_dtype(self.query.dtype)
        return self.keys(features, dtype) @ self.query.to(dtype)

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        query_NS = linear(u_ND.to(dtype), self.query.to(dtype))
        return linear(query_NS, self.keys(features, dtype))

    @torch.no_grad()
    def update(self, stats: RoutingStats) -> None:
        """Updates the mean input of every expert that was selected; see `Score.update`."""
        if stats.expert_input_ED is None:
            return
        load_E1 = stats.load_E.unsqueeze(1)
        mean_ED = (stats.expert_input_ED / load_E1).to(self.mean_input.dtype)
        moved_ED = self.mean_input.lerp(mean_ED, 1 - INPUT_MOMENTUM)
        self.mean_input.copy_(torch.where(load_E1 > 0, moved_ED, self.mean_input))


class SparsityScore(Score):
    """Prefers the experts of which a token is expected to activate the fewest inner units (MoE-X):

        logits_e = -erf(mu_e / (sqrt(2) s_e))
        mu_e = u . mean_h W_e[h] + mean_h b_e      s_e^2 = sum_i u_i^2 var_h W_e[h, i]

    with W_e [F, D] the layer before the activation (the gate, if there is one) and the population
    variance. If h's weights are drawn independently, (1 - logits) / 2 is the share of units above
    0. Logits are between -1 and 1. The sign is that of the paper's figure 1, where the sparsest
    win.

    It has no parameters. Unlike keys of the attentive score and mean keys of an emergent mixture,
    the moments keep their gradient, so that routing learns, from output weights and balance losses,
    in the experts' own weights. The variance is the mean square minus the squared mean, at least in
    fp32: its relative error is about 1e-7 (1 + mean^2 / variance).

    Source: Yang et al. 2025, "Mixture of experts made intrinsically interpretable", arXiv
    2503.07639.
    """

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(context.initializer_std)

    def features(self, experts: StackedExperts, dispatcher: Dispatcher) -> Tensor:
        """Computes moments over inner units: mean and mean square of the weights, and mean of the
        bias, [E, 2 D + 1], differentiable.
        """
        weight_EDF, bias_EF = experts.first_layer()
        dtype = router_dtype(weight_EDF.dtype)
        mean_ED = weight_EDF.mean(2, dtype=dtype)
        # A norm reads weights in bf16 without an fp32 copy.
        square_ED = vector_norm(weight_EDF, dim=2, dtype=dtype).square() / weight_EDF.shape[2]
        if bias_EF is None:
            bias_E1 = mean_ED.new_zeros(len(mean_ED), 1)
        else:
            bias_E1 = bias_EF.mean(1, keepdim=True, dtype=dtype)
        return dispatcher.unit_means(torch.cat([mean_ED, square_ED, bias_E1], 1))

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Raises an error: s_e grows with anything that is added to a token, so no direction raises
        the logit of one expert at every magnitude."""
        raise NoColumnsError("the sparsity score has no direction that raises an expert's score")

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        mean_ED, square_ED, bias_E = self._moments(features)
        u_ND = u_ND.to(mean_ED.dtype)
        mu_NE = linear(u_ND, mean_ED, bias_E)
        variance_ED = (square_ED - mean_ED.square()).clamp_min(0)
        # Without variance all units are above 0 or none is; the bound keeps gradients finite.
        variance_NE = linear(u_ND.square(), variance_ED).clamp_min(LEAST_VARIANCE)
        return -torch.erf(mu_NE / (2 * variance_NE).sqrt())

    def active_shares(self, logits_NE: Tensor) -> Tensor:
        """See `Score.active_shares`."""
        return (1 - logits_NE) / 2

    def _moments(self, features: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        assert features is not None
        width = features.shape[1] // 2
        mean_ED, square_ED, bias_E1 = torch.split(features, [width, width, 1], 1)
        return mean_ED, square_ED, bias_E1.squeeze(1)


def expert_input(u_ND: Tensor, expert_ids_NK: Tensor, num_experts: int) -> Tensor:
    """Averages the token over all N K assignments, counting 0 for those to another expert.

    Divided by an expert's load it is the mean of the tokens that selected it, also after both are
    averaged over micro-batches and ranks.

    Args:
        u_ND: Tokens; no gradient flows to them.
        expert_ids_NK: The experts of each token.
        num_experts: E.

    Returns:
        [E, D], at least fp32.
    """
    u_ND = u_ND.detach().to(router_dtype(u_ND.dtype))
    chosen_NE = u_ND.new_zeros(u_ND.shape[0], num_experts).scatter(1, expert_ids_NK, 1.0)
    return chosen_NE.T @ u_ND / expert_ids_NK.numel()


SCORES: dict[str, Callable[[SparseMoEConfig, FeedForwardContext], Score]] = {
    "linear": LinearScore,
    "cosine": CosineScore,
    "random": RandomScore,
    "attentive": AttentiveScore,
    "sparsity": SparsityScore,
}
