"""The exchange of rows between processes that have different experts.

A process sends each row to the one that has its expert and gets the output back; backward the
gradients go the same ways.

Shapes: M rows, E experts, D width, P processes that share the experts, X experts of each.
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
    """Returns at once: the numbers are there."""


class Counts(NamedTuple):
    """How many rows travel."""

    arriving: Sequence[Tensor]
    """For each lot, the rows that come from each process for each expert here, on the device."""
    numbers: Tensor
    """[2, lots, P]: sent and received, perhaps on their way to the host."""
    wait: Callable[[], None] = _on_host
    """Returns when the numbers are on the host."""


class RowExchange:
    """Sends rows to the processes that have their experts, and returns the outputs.

    With two lots of experts on each process, the rows of one travel while the experts of the other
    compute, forward and backward. Every expert sees the same rows at once as with one lot.

    Args:
        num_experts: E.
        parts: processes that share them.
        lots: of the experts of a process.
    """

    def __init__(self, num_experts: int, parts: int, lots: int = 1) -> None:
        here = num_experts // parts
        self.parts, self.lots = parts, lots
        self.sizes = [here - here // 2, here // 2] if lots == 2 else [here]
        self.group: Group
        """The processes; set when the engine has made their group."""

    def order(self, selected: Selected) -> tuple[Tensor, Tensor]:
        """Numbers of the experts by which rows are sorted: lot by lot, in each by process."""
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
        """Exchanges how many rows come, and has the numbers on their way to the host."""
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
        # The only place where the CPU waits for the GPU.
        counts.wait()
        numbers = counts.numbers
        if numbers.is_cuda:  # compiled, where `tolist` would copy them one by one
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
        """Runs rows that came sorted by sender, then by expert, through a lot of experts."""
        here = counts_PX.shape[1]
        if here == 1:
            return experts(arrived_MD, counts_PX.sum(0), weights)
        expert_E = torch.arange(here, device=counts_PX.device).repeat(self.parts)
        expert_M = expert_E.repeat_interleave(counts_PX.flatten(), output_size=total)
        counts_X = counts_PX.sum(0)
        order_M, place_M, *_ = make_plan(expert_M.unsqueeze(1), counts_X)
        sorted_MD = experts(permute(arrived_MD, order_M, place_M), counts_X, weights)
        return permute(sorted_MD, place_M, order_M)
