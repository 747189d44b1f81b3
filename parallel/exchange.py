"""The all-to-all exchange of rows between ranks that have different experts.

A rank sends each row to the rank of its expert and gets the output back; in the backward pass the
gradients take the same routes.

Shapes: M rows, E experts, D width, P ranks that share the experts, X experts of each.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyad.model.kernels.rows import permute
from polyad.model.smoe.dispatch import Plan, make_plan
from polyad.model.smoe.experts import ExpertWeights, StackedExperts
from polyad.model.smoe.selection import Selected
from polyad.parallel.regions import Flight, Group, wait


def _on_host() -> None:
    """Returns at once: the numbers are already on the CPU."""


class Counts(NamedTuple):
    """Numbers of rows to exchange."""

    arriving: Sequence[Tensor]
    """For each lot, the rows from each rank for each expert of this one, on the device."""
    numbers: Tensor
    """[2, lots, P]: sent and received, possibly still being copied to the CPU."""
    wait: Callable[[], None] = _on_host
    """Returns when the numbers are on the CPU."""


class RowExchange:
    """Sends rows to the ranks of their experts, and returns the outputs.

    A rank's experts can be divided into two lots: the rows of one are sent while the experts of the
    other compute, forward and backward. Every expert processes the same rows at once as with one
    lot.

    Args:
        num_experts: E.
        parts: number of ranks that share them.
        lots: number of lots of a rank's experts, 1 or 2.
    """

    def __init__(self, num_experts: int, parts: int, lots: int = 1) -> None:
        here = num_experts // parts
        self.parts, self.lots = parts, lots
        self.sizes = [here - here // 2, here // 2] if lots == 2 else [here]
        self.group: Group
        """The ranks; set once the engine has created their group."""

    def order(self, selected: Selected) -> tuple[Tensor, Tensor]:
        """Renumbers the experts for sorting rows: lot by lot, and within a lot by rank."""
        expert_ids_NK, counts_E = selected.expert_ids_NK, selected.counts_E
        if self.lots == 1:
            return expert_ids_NK, counts_E
        first, second = self.sizes
        process, expert = expert_ids_NK // (first + second), expert_ids_NK % (first + second)
        early = process * first + expert
        late = self.parts * first + process * second + expert - first
        of_lots = counts_E.view(self.parts, -1).split(self.sizes, dim=1)
        counts_E = torch.cat([counts.flatten() for counts in of_lots])
        return torch.where(expert < first, early, late), counts_E

    def begin(self, plan: Plan) -> Counts:
        """Exchanges the numbers of rows, and starts copying them to the CPU."""
        lots = plan.counts_E.split([self.parts * size for size in self.sizes])
        leaving = [counts.view(self.parts, -1) for counts in lots]
        even = [sum(self.sizes)] * self.parts
        counts_E = torch.cat(leaving, 1).flatten()
        arriving_E = wait(self.group.start_exchange(counts_E, even, even))
        arriving = arriving_E.view(self.parts, -1).split(self.sizes, dim=1)
        numbers = torch.stack(
            [torch.stack([counts_PX.sum(1) for counts_PX in each]) for each in (leaving, arriving)]
        )
        if numbers.is_cuda and not torch.compiler.is_compiling():
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = pinned.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            return Counts(arriving, numbers, copied.synchronize)
        return Counts(arriving, numbers)

    def __call__(
        self, rows_MD: Tensor, plan: Plan, experts: StackedExperts, counts: Counts
    ) -> Tensor:
        """Computes the experts of all rows; see `Dispatcher.compute`."""
        # The only place where the CPU synchronizes with the GPU.
        counts.wait()
        numbers = counts.numbers
        if numbers.is_cuda:  # compiled; `tolist` would copy them one by one
            numbers = numbers.cpu()
        send, receive = numbers.tolist()
        num_rows, num_sent = rows_MD.shape[0], sum(map(sum, send))
        if plan.drops:
            rows_MD = rows_MD[:num_sent]
        if self.lots == 1:
            done_MD = self._in_turn(rows_MD, receive[0], send[0], counts.arriving[0], experts)
        else:
            done_MD = self._overlapping(rows_MD, receive, send, counts.arriving, experts)
        return pad(done_MD, (0, 0, 0, num_rows - num_sent)) if plan.drops else done_MD

    def _in_turn(
        self,
        rows_MD: Tensor,
        receive: list[int],
        send: list[int],
        arriving_PX: Tensor,
        experts: StackedExperts,
    ) -> Tensor:
        arrived_MD = self.group.exchange(rows_MD, receive, send)
        done_MD = self._compute(arrived_MD, arriving_PX, sum(receive), experts, None)
        return self.group.exchange(done_MD, send, receive)

    def _overlapping(
        self,
        rows_MD: Tensor,
        receive: list[list[int]],
        send: list[list[int]],
        arriving: Sequence[Tensor],
        experts: StackedExperts,
    ) -> Tensor:
        there = [Flight(*way, self.group) for way in zip(receive, send, strict=True)]
        back = [Flight(*way, self.group) for way in zip(send, receive, strict=True)]
        of_lots = rows_MD.split([sum(each) for each in send])
        away = [flight.depart(rows) for flight, rows in zip(there, of_lots, strict=True)]
        coming = []
        for lot, weights in enumerate(experts.split(self.sizes)):
            arrived_MD = there[lot].arrive(away[lot])
            total = sum(receive[lot])
            done_MD = self._compute(arrived_MD, arriving[lot], total, experts, weights)
            coming.append(back[lot].depart(done_MD))
        return torch.cat([flight.arrive(rows) for flight, rows in zip(back, coming, strict=True)])

    def _compute(
        self,
        arrived_MD: Tensor,
        counts_PX: Tensor,
        total: int,
        experts: StackedExperts,
        weights: ExpertWeights | None,
    ) -> Tensor:
        """Runs rows, sorted by sender and then by expert, through a lot of experts."""
        here = counts_PX.shape[1]
        if here == 1:
            return experts(arrived_MD, counts_PX.sum(0), weights)
        expert_E = torch.arange(here, device=counts_PX.device).repeat(self.parts)
        expert_M = expert_E.repeat_interleave(counts_PX.flatten(), output_size=total)
        counts_X = counts_PX.sum(0)
        order_M, place_M, *_ = make_plan(expert_M.unsqueeze(1), counts_X)
        sorted_MD = experts(permute(arrived_MD, order_M, place_M), counts_X, weights)
        return permute(sorted_MD, place_M, order_M)
