"""Dispatch: sends tokens to their selected experts, and returns the experts' outputs.

No token is dropped unless a capacity is asked for, and no row is added: assignments are sorted by
expert, and each expert takes the rows that it has. A capacity counts the assignments of one
micro-batch of one process, wherever the experts are: the same tokens are dropped on any layout that
cuts a step into the same micro-batches.

Shapes: N tokens, K experts of a token, M = N K rows, E experts, D width,
F inner width of an expert.
"""

import math
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from polyad.model.kernels import rows
from polyad.model.regions import Region, same
from polyad.model.smoe.experts import Experts, StackedExperts
from polyad.model.smoe.selection import Selected


class Plan(NamedTuple):
    """The order of rows by expert. Assignment a = n K + k is the k-th expert of token n."""

    assignment_M: Tensor
    """The assignment of each row; rows are sorted by expert, then by assignment, or by priority,
    and those that no expert takes come last."""
    row_A: Tensor
    """The row of each assignment."""
    counts_E: Tensor
    """Rows of each expert."""
    drops: bool = False
    """Whether there may be rows that no expert takes. How many is known on the device alone."""

    def kept_M(self) -> Tensor:
        """Whether an expert takes the row."""
        row_M = torch.arange(self.row_A.shape[0], device=self.row_A.device)
        return row_M < self.counts_E.sum()


def make_plan(
    expert_ids_NK: Tensor,
    counts_E: Tensor,
    capacity_factor: float | None = None,
    priority_N: Tensor | None = None,
) -> Plan:
    """Sorts assignments by expert.

    With a priority the capacity is filled by batch priority routing (Riquelme et al. 2021, section
    4.1, with the maximum as the score of a token).

    Args:
        expert_ids_NK: The experts of each token.
        counts_E: How many tokens have each.
        capacity_factor: Rows that an expert takes, times N K / E; None: all.
        priority_N: An expert takes all first choices before any second one, and equal choices from
            the token with the highest number down; None: as tokens come.

    Returns:
        The plan.
    """
    expert_A = expert_ids_NK.reshape(-1)
    num_experts = counts_E.shape[0]
    # A GPU sorts a few bits at a time.
    key_A = expert_A.to(torch.int16) if num_experts <= 2**15 else expert_A
    total = expert_A.numel()
    if priority_N is None:
        sorted_A, assignment_A = key_A.sort(stable=True)
    else:
        order_A = _by_priority(priority_N, expert_ids_NK.shape[1])
        sorted_A, place_A = key_A[order_A].sort(stable=True)
        assignment_A = order_A[place_A]
    rank_A = torch.arange(total, device=expert_A.device)
    if capacity_factor is None:
        return Plan(
            assignment_A, torch.empty_like(rank_A).scatter(0, assignment_A, rank_A), counts_E
        )
    # In floating point 1.1 x 50 / 5 is a little more than 11; it must give 11.
    capacity = math.ceil(capacity_factor * total / num_experts - 1e-9)
    first_E = counts_E.cumsum(0) - counts_E
    dropped_A = rank_A - first_E[sorted_A.long()] >= capacity
    assignment_M = assignment_A[dropped_A.to(torch.uint8).sort(stable=True).indices]
    row_A = torch.empty_like(rank_A).scatter(0, assignment_M, rank_A)
    return Plan(assignment_M, row_A, counts_E.clamp_max(capacity), drops=True)


def _by_priority(priority_N: Tensor, top_k: int) -> Tensor:
    """All assignments: choice by choice, and of each choice the tokens from the highest down."""
    token_N = priority_N.argsort(descending=True, stable=True)
    choice_K1 = torch.arange(top_k, device=token_N.device).unsqueeze(1)
    return (token_N * top_k + choice_K1).reshape(-1)


Apart: TypeAlias = Literal["none", "sample", "all"]
"""Tokens for which the outputs of single experts are returned: none, a few without gradient, or
all."""
SAMPLED_TOKENS = 256
"""Most tokens of a sample, at equal distances."""


def sampled(tokens_ND: Tensor) -> Tensor | None:
    """Which tokens a sample has, at most `SAMPLED_TOKENS`; None: all of them."""
    if len(tokens_ND) <= SAMPLED_TOKENS:
        return None
    place_N = torch.arange(SAMPLED_TOKENS, device=tokens_ND.device)
    return place_N * len(tokens_ND) // SAMPLED_TOKENS


class Dispatched(NamedTuple):
    """What comes back from the experts."""

    y_ND: Tensor
    """The weighted sum over the experts of each token."""
    plan: Plan | None
    """Where the assignments went; None where none had to go anywhere."""
    outputs_NKD: Tensor | None = None
    """The output of each expert of a token, before its bias and weight; 0 where it was dropped.
    None: it was not asked for."""
    sample_N: Tensor | None = None
    """Which tokens these outputs are of; None: all."""


class DispatchRegions(NamedTuple):
    """Where processes that each have some inner units of every expert exchange numbers.

    See `model/regions.py`.
    """

    tokens: Region = same
    weights: Region = same
    """The routing weights."""
    output: Region = same
    unit_mean: Region = same
    """A mean over inner units."""
    units: Region = same
    """Inner units, in the last dimension, without gradient."""


class Dispatcher(nn.Module):
    """Dispatch within one process; expert parallelism replaces it by a subclass."""

    regions: DispatchRegions = DispatchRegions()

    def forward(
        self,
        tokens_ND: Tensor,
        selected: Selected,
        experts: StackedExperts,
        capacity_factor: float | None = None,
        apart: Apart = "none",
    ) -> Dispatched:
        """Computes y_n = sum_k weight_nk expert_nk(token_n).

        Args:
            tokens_ND: The input of the experts.
            selected: Which experts, and their weights.
            experts: The experts, or those of them that this process has.
            capacity_factor: See `make_plan`.
            apart: Of which tokens the outputs of single experts are returned, too.

        Returns:
            The sums, where the assignments went, and these outputs.
        """
        tokens_ND = self.regions.tokens(tokens_ND)
        weights_NK = self.regions.weights(selected.weights_NK)
        ids_NK, counts_E = self.order(selected)
        plan = make_plan(ids_NK, counts_E, capacity_factor, selected.priority_N)
        begun = self.begin(plan)
        rows_MD = rows.take(tokens_ND, plan.assignment_M, plan.row_A)
        if plan.drops:
            # Neither has a meaning where no expert takes a row: its output, the input's gradient.
            kept_M1 = plan.kept_M().unsqueeze(1)
            rows_MD = self.compute(torch.where(kept_M1, rows_MD, 0), plan, experts, begun)
            rows_MD = torch.where(kept_M1, rows_MD, 0)
        else:
            rows_MD = self.compute(rows_MD, plan, experts, begun)
        if experts.dropout.p:
            rows_MD = dropout(rows_MD, experts.dropout.p, experts.training)
        weights_NK = weights_NK.to(rows_MD.dtype)
        y_ND = rows.combine(rows_MD, weights_NK, plan.assignment_M, plan.row_A)
        y_ND = self.regions.output(y_ND)
        if apart == "none":
            return Dispatched(y_ND, plan)
        sample_N, (tokens, top_k) = None, weights_NK.shape
        if apart == "all":
            outputs_MD = rows.permute(rows_MD, plan.row_A, plan.assignment_M)
        else:
            row_NK, sample_N = plan.row_A.view(tokens, top_k), sampled(tokens_ND)
            row_NK = row_NK if sample_N is None else row_NK[sample_N]
            outputs_MD = rows_MD.detach()[row_NK.reshape(-1)]
        outputs_NKD = self.regions.output(outputs_MD).view(-1, top_k, rows_MD.shape[1])
        return Dispatched(y_ND, plan, outputs_NKD, sample_N)

    def order(self, selected: Selected) -> tuple[Tensor, Tensor]:
        """Numbers of the experts by which rows are sorted; by default their own.

        Args:
            selected: The experts of each token.

        Returns:
            A permutation of 0..E-1, applied to the experts of each token [N, K] and to their
            counts [E].
        """
        return selected.expert_ids_NK, selected.counts_E

    # What processes know of one another's experts. Each computes numbers of the experts and inner
    # units that it has, and reads those of all.

    def own_experts(self, whole: Tensor) -> Tensor:
        """Selects this process's experts from a tensor [E, ...] over all experts.

        Args:
            whole: The numbers, the same on all processes that share experts.
        """
        return whole

    def all_experts(self, own: Tensor) -> Tensor:
        """The numbers [E, ...] of all experts.

        Processes that share experts have a loss each. The gradient of `own` is its sum over all of
        them, as that of an expert's weights is, which gets the tokens of all.

        Args:
            own: The numbers of the experts that this process has.
        """
        return own

    def unit_means(self, means: Tensor) -> Tensor:
        """Means over inner units, [E, ...], of all experts and units, with a gradient.

        Processes that share inner units have one loss: each gets its part of the gradient.

        Args:
            means: Means over the units that this process has, of the experts that it has.
        """
        return self.all_experts(self.regions.unit_mean(means))

    def norms(self, rows_RD: Tensor, experts: StackedExperts) -> Tensor:
        """The norm of what the first layer of each expert, without its bias, makes of some rows.

        Products are in the precision of the experts' weights, sums over units in the rows'.

        Args:
            rows_RD: The same on all processes that share inner units; others may have others.
            experts: The experts, or those of them that this process has.

        Returns:
            [R, E], with a gradient, in the precision of the rows.
        """
        weight_eDF, _ = experts.first_layer()
        hidden_eRF = self.regions.tokens(rows_RD).to(weight_eDF.dtype) @ weight_eDF
        means_ER = self.unit_means(hidden_eRF.to(rows_RD.dtype).square().mean(2))
        squares_RE = means_ER.T * experts.num_units
        return squares_RE.clamp_min(torch.finfo(squares_RE.dtype).tiny).sqrt()

    def hidden(self, rows_ED: Tensor, experts: Experts) -> Tensor:
        """The hidden layer of every expert for a row of its own; see `Experts.hidden`.

        Args:
            rows_ED: A row for each expert of all processes.
            experts: The experts, or those of them that this process has.

        Returns:
            [E, F], of all experts and units, without gradient.
        """
        own_eF = experts.hidden(self.own_experts(rows_ED))
        return self.all_experts(self.regions.units(own_eF))

    def begin(self, plan: Plan) -> Any:
        """What can be done before there are rows; `compute` gets it.

        Args:
            plan: Where the rows go.
        """
        return None

    def compute(self, rows_MD: Tensor, plan: Plan, experts: StackedExperts, begun: Any) -> Tensor:
        """Runs rows, sorted by expert, through the experts.

        Args:
            rows_MD: The rows.
            plan: How many of them each expert has.
            experts: The experts.
            begun: What `begin` returned.

        Returns:
            [M, D], in the same order; rows that no expert takes hold arbitrary values.
        """
        output_MD: Tensor = experts(rows_MD, plan.counts_E)
        return output_MD
