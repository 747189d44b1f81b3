"""The emergent mixture of experts: a feed-forward of a block built from parts of smoe, and how a
dense feed-forward is split into it and merged again, bit for bit.

    y = sum_(e in TopK(x . mean K_e)) activation(x K_e^T + b_e) V_e + c

The experts are groups of the inner units of one dense feed-forward: the keys K are the rows of its
first matrix, the values V the columns of its second one. With a gate, the keys are the gate's rows,
and the activation is multiplied by x L_e^T + c_e, with L the rows of the up projection. With K = E
it equals the dense feed-forward whose units the experts are.

Splitting makes groups of units with similar keys, found by balanced k-means, or random ones. Keys
are normalized first, so that distances compare directions. Each round assigns the keys exactly, in
a time that grows with the cube of their number: about a second for 3,072.

Sources: Qiu et al. 2023, "Emergent mixture-of-experts", section 3.2; Malinen and Fränti 2014,
"Balanced k-means for clustering".

Shapes: N tokens, D width, E experts or groups, K experts of a token, F inner units of one expert,
in k-means F keys; U = E F units of all.
"""

from collections.abc import Callable
from typing import ClassVar, Literal, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.config import Count, SectionError, divisors, nearest_two
from polyad.model.feedforward import GATED, DenseFeedForwardConfig, FeedForwardContext
from polyad.model.initialization import ZEROS, Initializer, normal
from polyad.model.kernels.grouped import ExpertWeights
from polyad.model.smoe.config import Placement, SelectingConfig
from polyad.model.smoe.experts import StackedExperts
from polyad.model.smoe.graph import Graph, router_dtype
from polyad.model.smoe.layer import Dispatcher, SelectingMoE
from polyad.model.smoe.router import CosineScore, LinearScore, Router, Score, Selected, Selection


class EmergentMoEConfig(SelectingConfig):
    """A dense feed-forward whose inner units are divided into experts; each token uses some of
    them.

    `polyad convert --split` makes it from a trained dense model, and `--merge` turns it back into a
    dense one. Source: Qiu et al. 2023, "Emergent mixture-of-experts".
    """

    placement_key: ClassVar[str] = "blocks"

    kind: Literal["emoe"] = "emoe"
    """The kind of feed-forward."""
    top_k: Count = 8
    """Number of experts K that each token uses; with all of them it is the dense feed-forward."""
    hidden_size: Count | None = None
    """Inner width F of all experts of a block together, and of dense blocks, in units; null: four
    times the model's width."""
    blocks: Placement = 1
    """Blocks that are split into experts: 1 for all blocks, n for the last of every n blocks, or a
    list of block numbers, from 0. The others are dense."""
    score: Literal["avg_k", "linear", "cosine"] = "avg_k"
    """How tokens score the experts. `avg_k` has no parameters: the mean of the expert's keys (the
    rows of its first layer, or of its gate), and weight 1 for each selected expert. Learned:
    `linear` or `cosine`, as for smoe, with a softmax over the selected experts that is multiplied
    by their number, so that weights are 1 on average."""
    select: Literal["top_k", "bottom_k", "not_top_k"] = "top_k"
    """Which experts a token uses: the `top_k` with the highest scores, as many with the lowest
    (`bottom_k`), or all except the top_k highest (`not_top_k`). The last two are for comparison."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.used_experts() < 1:
            raise SectionError(
                f"@top_k: {self.top_k} of @num_experts: {self.num_experts} leaves no expert with "
                f"@select: not_top_k"
            )
        self.check_keys("top_k", ("router_noise", "@select: top_k", self.select == "top_k"))
        return self

    def used_experts(self) -> int:
        """Counts the experts that a token uses."""
        return self.num_experts - self.top_k if self.select == "not_top_k" else self.top_k

    def group_size(self, width: int) -> int:
        """Returns the number of inner units F of one expert in a model of width D."""
        return self.inner_size(width) // self.num_experts

    def of_model(self, *, width: int, bias: bool) -> Self:
        """Checks that experts have equal sizes; nothing is filled in."""
        inner = self.inner_size(width)
        if inner % self.num_experts:
            near = nearest_two(divisors(inner)[1:], self.num_experts)
            raise SectionError(
                f"@num_experts: {self.num_experts} does not divide the inner width {inner} "
                f"(@hidden_size); nearest that do: {near}"
            )
        return self

    def dense(self) -> DenseFeedForwardConfig:
        """Returns the dense feed-forward that the experts are parts of."""
        return DenseFeedForwardConfig(hidden_size=self.hidden_size)

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """Lists what tensor parallelism divides: the inner width, and that of one expert."""
        return [
            {"hidden_size": self.inner_size(width)},
            {"hidden_size / num_experts": self.group_size(width)},
        ]


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
        return {
            "keys": normal(self.context.initializer_std).each_expert(),
            "linear": normal(self.context.initializer_std).each_expert(),
            "values": normal(self.context.residual_std).each_expert(),
            "bias": ZEROS.each_expert(),
            "linear_bias": ZEROS.each_expert(),
        }

    def stacked(self) -> ExpertWeights:
        """See `StackedExperts.stacked`."""
        keys_EDF = self.keys.transpose(1, 2)
        if self.linear is None:
            return ExpertWeights(keys_EDF, self.bias, self.values)
        linear_EDF = self.linear.transpose(1, 2)
        return ExpertWeights(
            linear_EDF, self.linear_bias, self.values, gate=keys_EDF, gate_bias=self.bias
        )


_IN_ORDER = Initializer(lambda value, generator: value.copy_(torch.arange(len(value))))


class AverageKeys(Score):
    """Scores by the mean key of each expert, x . mean K_e; it has no parameters.

    The means are computed from the current keys, so the gate follows them in training and nothing
    is stored. The keys get no gradient from it; the tokens do, if a routing loss requires it.

    Args:
        mean_keys: Computes the mean key of each expert [E, D], in routing's precision.
    """

    def __init__(self, mean_keys: Callable[[], Tensor]) -> None:
        super().__init__()
        self.mean_keys = mean_keys

    def columns(self) -> Tensor:
        """Returns the mean keys."""
        return self.mean_keys()

    def forward(self, u_ND: Tensor) -> Tensor:
        """Scores the experts by their mean keys, [N, E]."""
        keys_ED = self.mean_keys()
        return linear(u_ND.to(keys_ED.dtype), keys_ED)


class UnitSelection(Selection):
    """Selects the experts with the highest or lowest logits; weights are 1, or 1 on average.

    Args:
        config: The layer's configuration.
    """

    def __init__(self, config: EmergentMoEConfig) -> None:
        super().__init__(config)
        self.is_learned = config.score != "avg_k"
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
        super().__init__(config, context)
        score: Score = AverageKeys(self.mean_keys)
        if config.score != "avg_k":
            score = (LinearScore if config.score == "linear" else CosineScore)(config, context)
        noise_std = config.router_noise / config.num_experts
        self.router = Router(score, Graph(), UnitSelection(config), noise_std)
        self.dispatcher = Dispatcher()
        self.experts = UnitGroups(config, context)
        self.output_bias = nn.Parameter(torch.empty(context.hidden_size)) if context.bias else None
        units = config.inner_size(context.hidden_size)
        self.register_buffer("unit", torch.empty(units, dtype=torch.int64))

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers of its own parameters; its parts have their own."""
        return {"output_bias": ZEROS, "unit": _IN_ORDER}

    def mean_keys(self) -> Tensor:
        """Computes the mean key of each expert of all ranks [E, D], without gradient."""
        keys_EFD = self.experts.keys.detach()
        return self.dispatcher.unit_means(keys_EFD.mean(1, dtype=router_dtype(keys_EFD.dtype)))

    def add_bias(self, y_ND: Tensor, selected: Selected) -> Tensor:
        """Adds the output bias, once per token."""
        assert self.output_bias is not None
        return y_ND + self.output_bias


OF_UNITS = {
    "gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1,
}  # fmt: skip
"""The unit axis of each tensor of a dense feed-forward; tensors not listed have none."""


def dense_names(*, gated: bool) -> dict[str, str]:
    """Maps the tensors of groups to the dense tensors that hold the same values.

    Args:
        gated: Whether it has a gate.
    """
    keys, others = ("gate", {"experts.linear": "up.weight", "experts.linear_bias": "up.bias"})
    if not gated:
        keys, others = "up", {}
    return others | {
        "experts.keys": f"{keys}.weight",
        "experts.bias": f"{keys}.bias",
        "experts.values": "down.weight",
        "output_bias": "down.bias",
    }


def split(name: str, dense: Tensor, unit_U: Tensor, num_experts: int) -> Tensor:
    """Makes a tensor of unit groups.

    Args:
        name: The name of the dense tensor, such as `up.weight`.
        dense: The dense tensor.
        unit_U: The unit at each position, group by group: a stable argsort of the group of each.
        num_experts: E.

    Returns:
        Keys or values [E, F, D], unit biases [E, F], or the output bias [D].
    """
    if name not in OF_UNITS:
        return dense
    rows = dense.movedim(OF_UNITS[name], 0)[unit_U]
    return rows.reshape(num_experts, -1, *rows.shape[1:])


def merge(name: str, stacked: Tensor, unit_U: Tensor) -> Tensor:
    """Makes a tensor of the dense feed-forward; the inverse of `split`.

    Args:
        name: The name of the dense tensor.
        stacked: The tensor of groups.
        unit_U: See `split`.
    """
    if name not in OF_UNITS:
        return stacked
    rows = stacked.flatten(0, 1)
    dense = torch.empty_like(rows)
    dense[unit_U] = rows
    return dense.movedim(0, OF_UNITS[name]).contiguous()


Numbers: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64]

MOST_ROUNDS = 50
"""Maximum number of k-means rounds."""


def balanced_kmeans(keys_FD: Numbers, groups: int, seed: int) -> Labels:
    """Clusters keys into groups of equal size by their directions.

    Args:
        keys_FD: Finite keys.
        groups: E, which divides F.
        seed: The seed of the initial centers (k-means++).

    Returns:
        The group of each key [F], from 0.
    """
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist
    from sklearn.cluster import kmeans_plusplus
    from sklearn.preprocessing import normalize

    x_FD: Numbers = normalize(keys_FD.astype(np.float64))
    size = len(x_FD) // groups
    centers_ED, _ = kmeans_plusplus(x_FD, groups, random_state=seed)
    group_F = np.full(len(x_FD), -1)
    for _ in range(MOST_ROUNDS):
        cost_FF = np.repeat(cdist(x_FD, centers_ED, "sqeuclidean"), size, axis=1)
        before_F, group_F = group_F, linear_sum_assignment(cost_FF)[1] // size
        if np.array_equal(before_F, group_F):
            break
        centers_ED = np.stack([x_FD[group_F == group].mean(0) for group in range(groups)])
    return group_F


def random_groups(num_keys: int, groups: int, seed: int) -> Labels:
    """Divides keys into random groups of equal size.

    Args:
        num_keys: F.
        groups: E, which divides F.
        seed: The seed of the grouping.

    Returns:
        The group of each key [F], from 0.
    """
    return np.random.default_rng(seed).permutation(np.arange(num_keys, dtype=np.int64) % groups)
