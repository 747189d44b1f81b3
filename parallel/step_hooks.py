"""Checks between the gradient and the weight update: a step may be refused.

A refused step changes nothing, like a non-finite one.
"""

import math
from typing import Any

import torch
from torch import nn

from polyad.parallel import comm
from polyad.parallel.gradients import Fp32Gradients


def above(norm: float, limit: float) -> bool:
    """Returns whether a norm is above a limit on any rank; the result is the same on all.

    The norm is the same on all as well, unless a rank computes something different: without this
    exchange one rank might skip a step that the others apply.

    Args:
        norm: the gradient norm.
        limit: the same on all ranks; if it is infinite, nothing is exchanged.
    """
    return math.isfinite(limit) and comm.any_rank(not norm <= limit)


class StageZeroHook:
    """Runs before the optimizer's step in stage 0: norm, check for finite values, clipping.

    Args:
        clip_grad_norm: maximum norm, 0 for no clipping.
        copies: for each parameter, in the optimizer's order, how many ranks hold the same part.
        world: this rank.
    """

    def __init__(self, clip_grad_norm: float, copies: list[int], world: comm.World) -> None:
        self.clip_grad_norm = clip_grad_norm
        self.refuse_above = math.inf
        self.grad_norm: float | None = None
        self.refused = False
        """Whether the last step was refused, which DeepSpeed's bf16 optimizer does not know."""
        self.gradients: Fp32Gradients | None = None
        """In bf16, the source of the master weights' gradients."""
        self._copies, self._is_cut = copies, any(n != world.size for n in copies)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called by the optimizer before its step."""
        if self.gradients is not None:
            self.gradients.reduce()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = self._norm(parameters) if self._is_cut else nn.utils.get_total_norm(gradients)
        self.grad_norm = norm.item()
        refused = above(self.grad_norm, self.refuse_above)  # on all ranks
        self.refused = refused = refused or not math.isfinite(self.grad_norm)
        optimizer.overflow = refused  # type: ignore[attr-defined]  # tells the engine
        if refused:
            for parameter in parameters:
                parameter.grad = None  # without gradients the optimizer changes nothing
        elif 0.0 < self.clip_grad_norm < self.grad_norm:
            # The formula of DeepSpeed's other stages.
            torch._foreach_mul_(gradients, self.clip_grad_norm / (self.grad_norm + 1e-6))

    def _norm(self, parameters: list[Any]) -> torch.Tensor:
        """Computes the norm over all ranks; a part that several ranks hold counts once."""
        # In bf16 these are DeepSpeed's fp32 masters, in the order of the model's parameters, which
        # is also the order of the copies.
        pairs = [(p.grad, n) for p, n in zip(parameters, self._copies, strict=True)]
        shares = [g.float().square().sum() / n for g, n in pairs if g is not None]
        return comm.sum_over_ranks(torch.stack(shares).sum()).sqrt()
