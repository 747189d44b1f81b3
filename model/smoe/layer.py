"""The sparse mixture of experts as a feed-forward of a block: a router, a dispatcher and experts.

    y_i = sum_e TopK(p_i)_e g_e(u_i)

The dispatcher sends tokens to their selected experts and combines the experts' outputs. Without a
capacity no token is dropped, and there is no padding: assignments are sorted by expert, and each
expert processes its own rows. A capacity counts the assignments of one micro-batch of one process,
wherever the experts are: the same tokens are dropped in any parallel layout that cuts a step into
the same micro-batches.

Shapes: B batch, T tokens in a sequence, N real tokens (B T without padding), D width, E experts, K
experts of a token, M = N K rows, F inner width of an expert.
"""

import dataclasses
import math
from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from polyad.model.feedforward import (
    NOTHING_ELSE,
    BlockInput,
    DenseFeedForward,
    DenseFeedForwardConfig,
    FeedForward,
    FeedForwardContext,
)
from polyad.model.initialization import ZEROS, Initializer, normal
from polyad.model.kernels.grouped import combine, take
from polyad.model.layers import Linear, Region, pack, same, unpack
from polyad.model.output import RoutingStats
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig
from polyad.model.smoe.experts import Experts, StackedExperts
from polyad.model.smoe.router import Router, Selected, make_router, spread


class Plan(NamedTuple):
    """The order of rows by expert. Assignment a = n K + k is the k-th expert of token n."""

    assignment_M: Tensor
    """The assignment of each row; rows are sorted by expert, then by assignment; dropped rows
    come last."""
    row_A: Tensor
    """The row of each assignment."""
    counts_E: Tensor
    """Number of rows of each expert."""
    drops: bool = False
    """Whether rows may be dropped. Their number is known only on the device."""

    def kept_M(self) -> Tensor:
        """Returns whether each row is processed by an expert."""
        row_M = torch.arange(self.row_A.shape[0], device=self.row_A.device)
        return row_M < self.counts_E.sum()


def make_plan(
    expert_ids_NK: Tensor,
    counts_E: Tensor,
    capacity_factor: float | None = None,
) -> Plan:
    """Sorts assignments by expert.

    Args:
        expert_ids_NK: The experts of each token.
        counts_E: Number of tokens of each expert.
        capacity_factor: Maximum rows per expert, as a multiple of N K / E; None for no limit. An
            expert keeps the rows of the first tokens.

    Returns:
        The plan.
    """
    expert_A = expert_ids_NK.reshape(-1)
    num_experts = counts_E.shape[0]
    # A GPU sorts by a few bits at a time.
    key_A = expert_A.to(torch.int16) if num_experts <= 2**15 else expert_A
    total = expert_A.numel()
    sorted_M, assignment_M = key_A.sort(stable=True)
    rank_M = torch.arange(total, device=expert_A.device)
    if capacity_factor is not None:
        # In floating point 1.1 x 50 / 5 is slightly more than 11; the result must be 11.
        capacity = math.ceil(capacity_factor * total / num_experts - 1e-9)
        first_E = counts_E.cumsum(0) - counts_E
        dropped_M = rank_M - first_E[sorted_M.long()] >= capacity
        assignment_M = assignment_M[dropped_M.to(torch.uint8).sort(stable=True).indices]
        counts_E = counts_E.clamp_max(capacity)
    row_A = torch.empty_like(rank_M).scatter(0, assignment_M, rank_M)
    return Plan(assignment_M, row_A, counts_E, drops=capacity_factor is not None)


class DispatchRegions(NamedTuple):
    """Where ranks that each have some inner units of every expert exchange tensors.

    See `model/layers.py`.
    """

    tokens: Region = same
    weights: Region = same
    """Applied to the routing weights."""
    output: Region = same
    unit_mean: Region = same
    """Applied to a mean over inner units."""


class Dispatcher(nn.Module):
    """Dispatch within one process; expert parallelism replaces it with a subclass."""

    regions: DispatchRegions = DispatchRegions()

    def forward(
        self,
        tokens_ND: Tensor,
        selected: Selected,
        experts: StackedExperts,
        capacity_factor: float | None = None,
    ) -> tuple[Tensor, Plan]:
        """Computes y_n = sum_k weight_nk expert_nk(token_n).

        Args:
            tokens_ND: The input of the experts.
            selected: The experts of each token, and their weights.
            experts: The experts, or this rank's part of them.
            capacity_factor: See `make_plan`.

        Returns:
            The sums and the plan.
        """
        tokens_ND = self.regions.tokens(tokens_ND)
        weights_NK = self.regions.weights(selected.weights_NK)
        plan = make_plan(selected.expert_ids_NK, selected.counts_E, capacity_factor)
        begun = self.begin(plan)
        rows_MD = take(tokens_ND, plan.assignment_M, plan.row_A, weights_NK.shape[1])
        if plan.drops:
            # For dropped rows, both the expert's output and the input's gradient are undefined.
            kept_M1 = plan.kept_M().unsqueeze(1)
            rows_MD = self.compute(torch.where(kept_M1, rows_MD, 0), plan, experts, begun)
            rows_MD = torch.where(kept_M1, rows_MD, 0)
        else:
            rows_MD = self.compute(rows_MD, plan, experts, begun)
        if experts.dropout.p:
            rows_MD = dropout(rows_MD, experts.dropout.p, experts.training)
        weights_NK = weights_NK.to(rows_MD.dtype)
        y_ND = combine(rows_MD, weights_NK, plan.assignment_M, plan.row_A)
        return self.regions.output(y_ND), plan

    def unit_means(self, means: Tensor) -> Tensor:
        """Averages over inner units: returns [E, ...] for all experts and units, without gradient.

        Args:
            means: Means over this rank's units, for its experts.
        """
        return self.regions.unit_mean(means)

    def begin(self, plan: Plan) -> Any:
        """Starts work that does not depend on the rows; its result is passed to `compute`.

        Args:
            plan: The plan of the assignments.
        """
        return None

    def compute(self, rows_MD: Tensor, plan: Plan, experts: StackedExperts, begun: Any) -> Tensor:
        """Runs rows, sorted by expert, through the experts.

        Args:
            rows_MD: The rows.
            plan: The plan, with the number of rows of each expert.
            experts: The experts.
            begun: The result of `begin`.

        Returns:
            [M, D], in the same order; dropped rows hold arbitrary values.
        """
        output_MD: Tensor = experts(rows_MD, plan.counts_E)
        return output_MD


class SelectingMoE(FeedForward):
    """The base class of feed-forwards whose router selects whole experts for each token.

    Args:
        config: The layer's configuration.
        context: Settings of the model.
    """

    router: Router
    dispatcher: Dispatcher
    """Sends tokens to experts; expert parallelism replaces it."""
    experts: StackedExperts
    output_bias: nn.Parameter | None
    """The bias that is added to the sum over experts."""

    def __init__(self, config: SelectingConfig, context: FeedForwardContext) -> None:
        super().__init__()
        self.config = config
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
        selected, stats = self.router(normalized_BTD, given)
        y_ND, plan = self.dispatcher(
            pack(normalized_BTD.flatten(0, 1), given.real),
            selected,
            self.experts,
            self.config.capacity(self.training),
        )
        kept_NK = None
        if plan.drops:
            kept_NK = plan.kept_M()[plan.row_A].view_as(selected.weights_NK)
            if self.router.measures:
                dropped = 1 - kept_NK.to(stats.load_E.dtype).mean()
                stats = stats._replace(measures=stats.measures | {"dropped": dropped})
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

    @abstractmethod
    def add_bias(self, y_ND: Tensor, selected: Selected) -> Tensor:
        """Adds the output bias.

        Args:
            y_ND: The sum over experts without it.
            selected: The experts of each token, with weight 0 for dropped assignments.
        """

    def parameters_by_expert(self) -> list[nn.Parameter]:
        """Returns parameters [E, ...] of which a token only uses the slices of its experts."""
        return list(self.experts.parameters())

    def gate_columns(self) -> list[Tensor]:
        """Returns the columns of the score, [E, D]: there is one level of experts."""
        return [self.router.score.columns()]

    def update(self, stats: RoutingStats, progress: float) -> None:
        """See `FeedForward.update`."""
        self.router.update(stats, progress)


class SparseMoE(SelectingMoE):
    """A mixture of MLPs.

    Args:
        config: Its own configuration.
        context: Settings of the model.
    """

    config: SparseMoEConfig
    experts: Experts

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(config, context)
        self.router, self.dispatcher = make_router(config, context), Dispatcher()
        self.experts = Experts(config, context)
        shape = config.num_experts, context.hidden_size
        self.output_bias = nn.Parameter(torch.empty(shape)) if context.bias else None
        if config.shared_hidden_size is not None:
            dense = DenseFeedForwardConfig(hidden_size=config.shared_hidden_size)
            of_shared = dataclasses.replace(context, activation=config.activation)
            self.shared = DenseFeedForward(dense, of_shared)
            if config.shared_gate:
                start = normal(context.initializer_std)
                self.shared_gate = Linear(context.hidden_size, 1, start, bias=False)

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers of its own parameters; its parts have their own."""
        return {"output_bias": ZEROS.each_expert()}

    def add_bias(self, y_ND: Tensor, selected: Selected) -> Tensor:
        """Adds the biases of a token's experts, weighted like their outputs."""
        assert self.output_bias is not None
        # sum_k weight_nk bias_(e_nk), as one product with the weights of all experts.
        weights_NE = spread(selected, self.config.num_experts)
        return torch.addmm(y_ND, weights_NE.to(y_ND.dtype), self.output_bias)

    def parameters_by_expert(self) -> list[nn.Parameter]:
        """Returns the experts' weights, and their output biases."""
        experts = super().parameters_by_expert()
        return experts if self.output_bias is None else [*experts, self.output_bias]
