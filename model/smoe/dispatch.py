"""Dispatch: sends tokens to their selected experts, and returns the experts' outputs.

No token is dropped unless a capacity is asked for, and no row is added: assignments are sorted by
expert, and each expert takes the rows that it has.

Shapes: N tokens, K experts of a token, M rows: assignments that are computed (N K unless some are
dropped), E experts, D width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.kernels import rows
from model.smoe.experts import Experts
from model.smoe.selection import Selected


class Plan(NamedTuple):
    """The order of rows by expert. Assignment a = n K + k is the k-th expert of token n."""

    assignment_M: Tensor
    """The assignment of each row; rows are sorted by expert, then by assignment."""
    row_A: Tensor
    """The row of each assignment; M for one that is dropped."""
    counts_E: Tensor
    """Rows of each expert."""


def make_plan(
    expert_ids_NK: Tensor, num_experts: int, capacity_factor: float | None = None
) -> Plan:
    """Sorts assignments by expert.

    Args:
        expert_ids_NK: The experts of each token.
        num_experts: E.
        capacity_factor: Rows that an expert takes, times N K / E; None: all.

    Returns:
        The plan.
    """
    expert_A = expert_ids_NK.reshape(-1)
    total = expert_A.numel()
    sorted_A, assignment_A = expert_A.sort(stable=True)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_A.device)
    counts_E = counts_E.scatter_add(0, expert_A, torch.ones_like(expert_A))
    rank_A = torch.arange(total, device=expert_A.device)
    if capacity_factor is None:
        return Plan(
            assignment_A, torch.empty_like(rank_A).scatter(0, assignment_A, rank_A), counts_E
        )
    # In floating point 1.1 x 50 / 5 is a little more than 11; it must give 11.
    capacity = math.ceil(capacity_factor * total / num_experts - 1e-9)
    first_E = counts_E.cumsum(0) - counts_E
    kept_A = rank_A - first_E[sorted_A] < capacity
    assignment_M = assignment_A[kept_A]
    row_A = torch.full_like(rank_A, assignment_M.numel())
    row_A = row_A.scatter(0, assignment_M, rank_A[: assignment_M.numel()])
    return Plan(assignment_M, row_A, counts_E.clamp_max(capacity))


class Dispatcher(nn.Module):
    """Dispatch within one process; expert parallelism replaces it by a subclass."""

    def forward(
        self,
        tokens_ND: Tensor,
        selected: Selected,
        experts: Experts,
        capacity_factor: float | None = None,
    ) -> tuple[Tensor, Plan]:
        """Computes y_n = sum_k weight_nk expert_nk(token_n).

        Args:
            tokens_ND: The input of the experts.
            selected: Which experts, and their weights.
            experts: The experts, or those of them that this process has.
            capacity_factor: See `make_plan`.

        Returns:
            y [N, D], and where the assignments went.
        """
        plan = make_plan(selected.expert_ids_NK, experts.config.num_experts, capacity_factor)
        rows_MD = take_rows(tokens_ND, plan)
        rows_MD = self.compute(rows_MD, plan.counts_E, experts)
        return combine(rows_MD, selected.weights_NK.to(rows_MD.dtype), plan), plan

    def compute(self, rows_MD: Tensor, counts_E: Tensor, experts: Experts) -> Tensor:
        """Runs rows, sorted by expert, through the experts.

        Args:
            rows_MD: The rows.
            counts_E: How many of them each expert has.
            experts: The experts.

        Returns:
            [M, D], in the same order.
        """
        output_MD: Tensor = experts(rows_MD, counts_E)
        return output_MD


def take_rows(tokens_ND: Tensor, plan: Plan) -> Tensor:
    """The token of each row.

    Args:
        tokens_ND: Tokens.
        plan: Where they go.

    Returns:
        [M, D].
    """
    return rows.take(tokens_ND, plan.assignment_M, plan.row_A)


def combine(rows_MD: Tensor, weights_NK: Tensor, plan: Plan) -> Tensor:
    """The weighted sum of the rows of each token; a dropped one counts as zero.

    Args:
        rows_MD: The experts' outputs.
        weights_NK: Of the rows' dtype.
        plan: Where they come from.

    Returns:
        [N, D].
    """
    return rows.combine(rows_MD, weights_NK, plan.assignment_M, plan.row_A)
