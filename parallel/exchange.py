"""The all-to-all exchange of rows between ranks that have different experts.

A rank sends each row to the rank of its expert and gets the output back; in the backward pass the
gradients take the same routes.

Shapes: M rows, E experts, D width, P ranks that share the experts, X experts of each.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyad.model.kernels.rows import permute
from polyad.model.smoe.dispatch import Plan, make_plan
from polyad.model.smoe.experts import StackedExperts
from polyad.parallel.regions import Group


def _on_host() -> None:
    """Returns at once: the numbers are already on the CPU."""


class Counts(NamedTuple):
    """Numbers of rows to exchange."""

    arriving_PX: Tensor
    """The rows from each rank for each expert of this one, on the device."""
    numbers: Tensor
    """[2, P]: sent and received, possibly still being copied to the CPU."""
    wait: Callable[[], None] = _on_host
    """Returns when the numbers are on the CPU."""


class RowExchange:
    """Sends rows to the ranks of their experts, and returns the outputs.

    Args:
        num_experts: E.
        parts: number of ranks that share them.
    """

    def __init__(self, num_experts: int, parts: int) -> None:
        self.parts, self._here = parts, num_experts // parts
        self.group: Group
        """The ranks; set once the engine has created their group."""

    def begin(self, plan: Plan) -> Counts:
        """Exchanges the numbers of rows, and starts copying them to the CPU."""
        even = [self._here] * self.parts
        arriving_PX = self.group.exchange(plan.counts_E, even, even).view(self.parts, -1)
        leaving_PX = plan.counts_E.view(self.parts, -1)
        numbers = torch.stack([leaving_PX.sum(1), arriving_PX.sum(1)])
        if numbers.is_cuda and not torch.compiler.is_compiling():
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = pinned.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            return Counts(arriving_PX, numbers, copied.synchronize)
        return Counts(arriving_PX, numbers)

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
        num_rows, num_sent = rows_MD.shape[0], sum(send)
        if plan.drops:
            rows_MD = rows_MD[:num_sent]
        arrived_MD = self.group.exchange(rows_MD, receive, send)
        done_MD = self._compute(arrived_MD, counts.arriving_PX, sum(receive), experts)
        done_MD = self.group.exchange(done_MD, send, receive)
        return pad(done_MD, (0, 0, 0, num_rows - num_sent)) if plan.drops else done_MD

    def _compute(
        self, arrived_MD: Tensor, counts_PX: Tensor, total: int, experts: StackedExperts
    ) -> Tensor:
        """Runs rows, sorted by sender and then by expert, through this rank's experts."""
        here = counts_PX.shape[1]
        if here == 1:
            return experts(arrived_MD, counts_PX.sum(0))
        expert_E = torch.arange(here, device=counts_PX.device).repeat(self.parts)
        expert_M = expert_E.repeat_interleave(counts_PX.flatten(), output_size=total)
        counts_X = counts_PX.sum(0)
        order_M, place_M, *_ = make_plan(expert_M.unsqueeze(1), counts_X)
        sorted_MD = experts(permute(arrived_MD, order_M, place_M), counts_X)
        return permute(sorted_MD, place_M, order_M)
