"""Base scores: logits over the experts, from each token alone.

A new score is a class here, a line of `SCORES` and a name in the config's `ScoreName`.

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
"""Below it the sparsity score takes inner units to be equal."""
INPUT_MOMENTUM = 0.99
"""Share of itself that an expert's mean input keeps in a step with tokens of its own."""


def router_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision that routing is computed in: fp32, or the model's if it is higher."""
    return torch.promote_types(dtype, torch.float32)


class NoColumnsError(ValueError):
    """A score has no directions that raise experts' logits."""


class Score(nn.Module, ABC):
    """The interface of a base score.

    Args:
        std: Standard deviation of initial weights.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def initializers(self) -> dict[str, Initializer]:
        """Says how each parameter starts; see `model/initialization.py`."""
        return {}

    @abstractmethod
    def columns(self, features: Tensor | None = None) -> Tensor:
        """The directions of a token that raise each expert's logit, [E, D].

        Args:
            features: As `forward` takes it.

        Raises:
            NoColumnsError: There are none.
        """

    def mean_inputs(self) -> Tensor | None:
        """The input [E, D] at which it wants to know each expert's hidden layer; None: it does
        not. The answer changes only in `update`.
        """
        return None

    def features(self, experts: StackedExperts, dispatcher: Dispatcher) -> Tensor | None:
        """What `forward` reads of the experts themselves; by default nothing.

        Args:
            experts: The experts, or those of them that this process has.
            dispatcher: Gives what all processes compute of theirs.

        Returns:
            [E, ...], of the experts of all processes; None: nothing.
        """
        return None

    @abstractmethod
    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """Scores the experts.

        Args:
            u_ND: Tokens.
            features: What `features` gave.

        Returns:
            Logits [N, E], fp32 at least; their softmax is r.
        """

    def rows(self) -> Tensor | None:
        """The learned rows [E, D] that tokens are multiplied by; None: there are none."""
        return None

    def active_shares(self, logits_NE: Tensor) -> Tensor | None:
        """The share of each expert's inner units that a score expects to be above 0, [N, E].

        Args:
            logits_NE: Its own.

        Returns:
            None from a score that expects nothing.
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
        """Normal weight, zero bias."""
        entries = {"weight": normal(self.std)}
        return entries | ({"bias": ZEROS} if self.bias is not None else {})

    def columns(self, features: Tensor | None = None) -> Tensor:
        """The weight."""
        return self.weight

    def rows(self) -> Tensor | None:
        """See `Score.rows`: with an adapter those of both."""
        return self.columns()

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        if self.in_model_dtype:
            return linear(u_ND, self.weight, self.bias).to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return linear(u_ND.to(dtype), self.weight.to(dtype), bias)


class CosineScore(Score):
    """Cosine of the projected token and an embedding of each expert, over a learned temperature.

    Source: Chi et al. 2022, "On the representation collapse of sparse mixture of experts" (X-MoE).
    """

    def __init__(self, config: SelectingConfig, context: FeedForwardContext) -> None:
        super().__init__(context.initializer_std)
        size = config.score_size()
        self.projection = nn.Parameter(torch.empty(size, context.hidden_size))
        self.embedding = nn.Parameter(torch.empty(config.num_experts, size))
        self.temperature = nn.Parameter(torch.empty(1))  # DeepSpeed takes no scalars

    def initializers(self) -> dict[str, Initializer]:
        """Normal directions, and X-MoE's temperature."""
        return {
            "projection": normal(self.std),
            "embedding": normal(self.std),
            "temperature": constant(INITIAL_TEMPERATURE),
        }

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Each expert's direction, taken back through the projection: the weight that gives the
        cosine before it is divided by the token's length.
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
        """Uniform, as PyTorch starts a linear layer."""
        return {"weight": uniform(self.bound)}

    def columns(self, features: Tensor | None = None) -> Tensor:
        """The weight."""
        return self.weight

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        return linear(u_ND.to(dtype), self.weight.to(dtype))


class AttentiveScore(Score):
    """Inner products of a token's query and the experts' keys, over the root of their width:

        logits = (u W_q) k^T / sqrt(S)

    The paper's keys are k = h W_k with h the hidden layer of every expert, before its ReLU, for the
    input at hand: every expert runs for every input. Here h is the same for all tokens, which is
    ours, so that an expert runs for the tokens that choose it: either k itself is learned
    (`expert_keys: learned`), or h is the mean of the expert's hidden layer, before its activation,
    over tokens that chose it in earlier steps (`hidden_means`). That layer is linear before the
    activation, so the mean is the layer at the mean token: a buffer holds that, a moving mean over
    steps, and h follows the expert's weights. h gets no gradient: W_q and W_k learn. Ours is also S
    in place of the hidden layer's width.

    A buffer starts as a random token, of unit variance as after LayerNorm and another for each
    expert: with zeros all keys would be equal, and every token would choose the same experts.

    Given the keys, the logits are linear in u: `columns` is the linear score that equals them.
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
        """Normal; learned keys with a deviation of 1, with which logits start as large as those of
        a linear score.
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
        """Hidden layers [E, F] at `mean_inputs`, if keys follow them; without gradient."""
        mean_ED = self.mean_inputs()
        if mean_ED is None:
            return None
        assert isinstance(experts, Experts)
        return dispatcher.hidden(mean_ED, experts)

    def keys(self, hidden_EF: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The keys over the root of their width, [E, S].

        Args:
            hidden_EF: Each expert's hidden layer at `mean_inputs`, before its activation and
                without gradient; None where keys are learned.
            dtype: The precision of the result.
        """
        if not self.follows:
            key_ES = self.key.to(dtype)
        else:
            assert hidden_EF is not None
            key_ES = linear(hidden_EF.to(dtype), self.key_projection.to(dtype))
        return key_ES / math.sqrt(key_ES.shape[1])

    def columns(self, features: Tensor | None = None) -> Tensor:
        """The weight of the linear score that gives the same logits."""
        dtype = router_dtype(self.query.dtype)
        return self.keys(features, dtype) @ self.query.to(dtype)

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        query_NS = linear(u_ND.to(dtype), self.query.to(dtype))
        return linear(query_NS, self.keys(features, dtype))

    @torch.no_grad()
    def update(self, stats: RoutingStats) -> None:
        """Moves the mean input of every expert that a token chose; see `Score.update`."""
        if stats.expert_input_ED is None:
            return
        load_E1 = stats.load_E.unsqueeze(1)
        mean_ED = (stats.expert_input_ED / load_E1).to(self.mean_input.dtype)
        moved_ED = self.mean_input.lerp(mean_ED, 1 - INPUT_MOMENTUM)
        self.mean_input.copy_(torch.where(load_E1 > 0, moved_ED, self.mean_input))


class SparsityScore(Score):
    """The experts of which a token is expected to activate the fewest inner units (MoE-X):

        logits_e = -erf(mu_e / (sqrt(2) s_e))
        mu_e = u . mean_h W_e[h] + mean_h b_e      s_e^2 = sum_i u_i^2 var_h W_e[h, i]

    with W_e [F, D] the layer before the activation, the gate of two, and the population variance.
    If h's weights are drawn independently, (1 - logits) / 2 is the share of units above 0. Logits
    lie between -1 and 1. The sign is that of the paper's figure 1, by which the sparsest win.

    It has no parameters. Unlike keys of the attentive score and mean keys of an emergent mixture
    the moments keep their gradient, so what routing learns, from the outputs' weights and from
    losses for balance, it learns in the experts' own weights. The variance is the mean square less
    the squared mean, in fp32 at least: exact to some 1e-7 (1 + mean^2 / variance).

    Source: Yang et al. 2025, "Mixture of experts made intrinsically interpretable", arXiv
    2503.07639.
    """

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(context.initializer_std)

    def features(self, experts: StackedExperts, dispatcher: Dispatcher) -> Tensor:
        """Moments over inner units: of the weights the mean and the mean square, of the bias the
        mean, [E, 2 D + 1], with a gradient.
        """
        weight_EDF, bias_EF = experts.first_layer()
        dtype = router_dtype(weight_EDF.dtype)
        mean_ED = weight_EDF.mean(2, dtype=dtype)
        # A norm reads weights in bf16 and keeps no copy of them in fp32.
        square_ED = vector_norm(weight_EDF, dim=2, dtype=dtype).square() / weight_EDF.shape[2]
        if bias_EF is None:
            bias_E1 = mean_ED.new_zeros(len(mean_ED), 1)
        else:
            bias_E1 = bias_EF.mean(1, keepdim=True, dtype=dtype)
        return dispatcher.unit_means(torch.cat([mean_ED, square_ED, bias_E1], 1))

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Raises an error: s_e grows with whatever is added to a token, so that no direction raises
        the logit of one expert at all strengths."""
        raise NoColumnsError("the sparsity score has no direction that raises an expert's score")

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        mean_ED, square_ED, bias_E = self._moments(features)
        u_ND = u_ND.to(mean_ED.dtype)
        mu_NE = linear(u_ND, mean_ED, bias_E)
        variance_ED = (square_ED - mean_ED.square()).clamp_min(0)
        # Where nothing varies every unit is above 0 or none is; the bound keeps gradients finite.
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
    """The mean over all N K assignments of the token, 0 for those to another expert.

    Over an expert's load it is the mean of the tokens that chose it, also once both are averaged
    over micro-batches and processes.

    Args:
        u_ND: Tokens; without gradient here.
        expert_ids_NK: The experts of each.
        num_experts: E.

    Returns:
        [E, D], fp32 at least.
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
