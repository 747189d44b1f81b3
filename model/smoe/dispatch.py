"""Dispatch: tokens to the experts that were selected for them, and their outputs back.

No token is dropped unless a capacity is asked for, and no row is added: assignments are sorted by
expert, and each expert takes the rows that it has.

Shapes: N tokens, K experts of a token, M rows: assignments that are computed (N K unless some are
dropped), E experts, D width.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from model.smoe.experts import Experts
from model.smoe.selection import Selected


class Plan(NamedTuple):
    """Where every assignment goes. Assignment a = n K + k is the k-th of token n."""

    assignment_M: Tensor
    """The assignment of each row; rows are sorted by expert, then by assignment."""
    row_A: Tensor
    """The row of each assignment; M for one that is dropped."""
    counts_E: Tensor
    """Rows of each expert."""


def plan(expert_ids_NK: Tensor, num_experts: int, capacity_factor: float | None = None) -> Plan:
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
    # 1.1 x 50 / 5 is a little more than 11 in floating point, and is to be 11.
    capacity = math.ceil(capacity_factor * total / num_experts - 1e-9)
    first_E = counts_E.cumsum(0) - counts_E
    kept_A = rank_A - first_E[sorted_A] < capacity
    assignment_M = assignment_A[kept_A]
    row_A = torch.full_like(rank_A, assignment_M.numel())
    row_A = row_A.scatter(0, assignment_M, rank_A[: assignment_M.numel()])
    return Plan(assignment_M, row_A, counts_E.clamp_max(capacity))


class Dispatcher(nn.Module):
    """Dispatch within one process; expert parallelism puts a subclass in its place."""

    def forward(
        self,
        tokens_ND: Tensor,
        selected: Selected,
        experts: Experts,
        capacity_factor: float | None = None,
    ) -> tuple[Tensor, Plan]:
        """Computes y_n = sum_k weight_nk expert_nk(token_n).

        Args:
            tokens_ND: What the experts see.
            selected: Which experts, and their weights.
            experts: The experts, or those of them that this process has.
            capacity_factor: See `plan`.

        Returns:
            y [N, D], and where the assignments went.
        """
        where = plan(selected.expert_ids_NK, experts.config.num_experts, capacity_factor)
        rows_MD = take_rows(tokens_ND, where)
        rows_MD = self.compute(rows_MD, where.counts_E, experts)
        return combine(rows_MD, selected.weights_NK.to(rows_MD.dtype), where), where

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


def take_rows(tokens_ND: Tensor, where: Plan) -> Tensor:
    """The token of each row.

    Args:
        tokens_ND: Tokens.
        where: Where they go.

    Returns:
        [M, D].
    """
    rows_MD: Tensor = _TakeRows.apply(  # type: ignore[no-untyped-call]
        tokens_ND, where.assignment_M, where.row_A
    )
    return rows_MD


def combine(rows_MD: Tensor, weights_NK: Tensor, where: Plan) -> Tensor:
    """The weighted sum of the rows of each token; a dropped one counts as zero.

    Args:
        rows_MD: The experts' outputs.
        weights_NK: Of the rows' dtype.
        where: Where they come from.

    Returns:
        [N, D].
    """
    y_ND: Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
        rows_MD, weights_NK, where.assignment_M, where.row_A
    )
    return y_ND


def _padded(rows: Tensor, row_A: Tensor) -> Tensor:
    """With a row of zeros at the end, if an assignment that was dropped points there."""
    if rows.shape[0] < row_A.shape[0]:
        return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return rows


def _takes_bags(rows_MD: Tensor) -> bool:
    """Whether sums of rows are one operation: on a CPU, which is slow at several over all rows."""
    return rows_MD.device.type == "cpu"


def _sum_rows(rows_MD: Tensor, row_NK: Tensor, weights_NK: Tensor | None = None) -> Tensor:
    """sum_k weight_nk row_nk, in fp32 at least; without weights the plain sum. [N, D]."""
    num_tokens, top_k = row_NK.shape
    if not row_NK.numel():  # of a process to which no row was sent
        return rows_MD.new_zeros(num_tokens, rows_MD.shape[1])
    rows_MD = _padded(rows_MD, row_NK.view(-1))
    if top_k == 1 and weights_NK is None:  # a permutation, of which nothing is summed
        return rows_MD.index_select(0, row_NK.view(-1))
    if _takes_bags(rows_MD):
        return embedding_bag(row_NK, rows_MD, per_sample_weights=weights_NK, mode="sum")
    rows_NKD = rows_MD.index_select(0, row_NK.view(-1)).view(num_tokens, top_k, -1)
    if weights_NK is None:
        return rows_NKD.sum(1)
    return torch.bmm(weights_NK.unsqueeze(1), rows_NKD).squeeze(1)


def _scaled_rows(tokens_ND: Tensor, token_M: Tensor, weight_M: Tensor) -> Tensor:
    """weight_m token_m. [M, D]."""
    if _takes_bags(tokens_ND) and token_M.numel():
        bags_M1, weights_M1 = token_M.unsqueeze(1), weight_M.unsqueeze(1)
        return embedding_bag(bags_M1, tokens_ND, per_sample_weights=weights_M1, mode="sum")
    return tokens_ND.index_select(0, token_M) * weight_M.unsqueeze(1)


def _products_with_rows(tokens_ND: Tensor, rows_MD: Tensor, row_NK: Tensor) -> Tensor:
    """token_n . row_nk; 0 for one that is dropped. [N, K]."""
    num_tokens, top_k = row_NK.shape
    if not row_NK.numel():
        return tokens_ND.new_zeros(num_tokens, top_k)
    rows_MD = _padded(rows_MD, row_NK.view(-1))
    if not _takes_bags(rows_MD):
        rows_NKD = rows_MD.index_select(0, row_NK.view(-1)).view(num_tokens, top_k, -1)
        return (rows_NKD * tokens_ND.unsqueeze(1)).sum(2)
    token_N = torch.arange(num_tokens)
    products_A: Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        tokens_ND.contiguous(),
        rows_MD,
        row_NK.reshape(-1),
        token_N * top_k,
        token_N.repeat_interleave(top_k),
        mode=0,
    )
    return products_A.view(num_tokens, top_k)


# Autograd's own backward of an index is an atomic addition of rows; here the inverse of the
# permutation is known, so that both directions only read.
class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_ND: Tensor, assignment_M: Tensor, row_A: Tensor) -> Tensor:
        ctx.save_for_backward(row_A)
        ctx.num_tokens = tokens_ND.shape[0]
        ctx.top_k = row_A.shape[0] // max(1, ctx.num_tokens)  # a process may get no row at all
        return tokens_ND.index_select(0, assignment_M // max(1, ctx.top_k))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (row_A,) = ctx.saved_tensors
        return _sum_rows(gradients[0], row_A.view(ctx.num_tokens, ctx.top_k)), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, weights_NK: Tensor, assignment_M: Tensor, row_A: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_MD, weights_NK, assignment_M, row_A)
        return _sum_rows(rows_MD, row_A.view_as(weights_NK), weights_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_MD, weights_NK, assignment_M, row_A = ctx.saved_tensors
        (gradient_ND,) = gradients
        token_M = assignment_M // weights_NK.shape[1]
        weight_M = weights_NK.reshape(-1).index_select(0, assignment_M)
        for_rows_MD = _scaled_rows(gradient_ND, token_M, weight_M)
        for_weights_NK = _products_with_rows(gradient_ND, rows_MD, row_A.view_as(weights_NK))
        return for_rows_MD, for_weights_NK, None, None
