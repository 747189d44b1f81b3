"""Hooks between the gradient and the update of the weights, which may refuse a step.

A refused step changes nothing, as a step that is not finite.
"""

import math
import sys
from typing import Any

import torch
from torch import nn

from polyad.parallel import comm
from polyad.parallel.gradients import Fp32Gradients


def above(norm: float, limit: float) -> bool:
    """Whether a norm is above a limit on any process; the answer is the same on all.

    The norm is the same on all as well, unless a process computes something else: without this
    question one would skip a step that the others take.

    Args:
        norm: of the gradient.
        limit: the same on all processes; if it is infinite, nothing is exchanged.
    """
    return math.isfinite(limit) and comm.any_rank(not norm <= limit)


class StageZeroHook:
    """Before the optimizer's step at stage 0: the norm, the finite check, the clip.

    Args:
        clip_grad_norm: the largest norm, 0 for no clipping.
        copies: for each parameter, in the optimizer's order, how many processes hold the same part.
        world: this process.
    """

    def __init__(self, clip_grad_norm: float, copies: list[int], world: comm.World) -> None:
        self.clip_grad_norm = clip_grad_norm
        self.refuse_above = math.inf
        self.grad_norm: float | None = None
        self.refused = False
        """Whether the last step was refused; DeepSpeed's bf16 optimizer does not know it."""
        self.gradients: Fp32Gradients | None = None
        """In bf16: the source of the master weights' gradients."""
        self._copies, self._is_cut = copies, any(n != world.size for n in copies)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called by the optimizer before its step."""
        if self.gradients is not None:
            self.gradients.reduce()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = self._norm(parameters) if self._is_cut else nn.utils.get_total_norm(gradients)
        self.grad_norm = norm.item()
        refused = above(self.grad_norm, self.refuse_above)  # on all processes
        self.refused = refused = refused or not math.isfinite(self.grad_norm)
        optimizer.overflow = refused  # type: ignore[attr-defined]  # tells the engine
        if refused:
            for parameter in parameters:
                parameter.grad = None  # an optimizer without gradients changes nothing
        elif 0.0 < self.clip_grad_norm < self.grad_norm:
            # The formula of DeepSpeed's other stages.
            torch._foreach_mul_(gradients, self.clip_grad_norm / (self.grad_norm + 1e-6))

    def _norm(self, parameters: list[Any]) -> torch.Tensor:
        """The norm over all processes; a part that several processes hold counts once."""
        # In bf16 these are DeepSpeed's fp32 masters, in the order of the model's parameters, which
        # the numbers of copies are listed in, too.
        pairs = [(p.grad, n) for p, n in zip(parameters, self._copies, strict=True)]
        shares = [g.float().square().sum() / n for g, n in pairs if g is not None]
        return comm.sum_over_ranks(torch.stack(shares).sum()).sqrt()


class ZeroHook:
    """Refuses steps at stages 1 to 3, where DeepSpeed's optimizers offer no hook.

    Each of its optimizers computes the norm, asks `is_invalid_grad_norm` of its module about it,
    and skips the step if the answer is true. During a step this class answers instead, and reads
    the norm from the device once: the optimizers ask about it again for each group of parameters.

    Args:
        optimizer: DeepSpeed's, around ours.
    """

    def __init__(self, optimizer: Any) -> None:
        self.refuse_above = math.inf
        self.refused = False
        """Always False: DeepSpeed itself knows whether the last step was refused."""
        self.grad_norm: float | None = None
        """The norm of the last step; None if it was not asked for, as gradients had overflown."""
        self.replicas = 1
        """Divisor of DeepSpeed's gradients: 1 where they are means, else the number of summands."""
        module: Any = sys.modules[type(optimizer).__module__]
        is_invalid, step = module.is_invalid_grad_norm, optimizer.step

        answer: list[bool] = []

        def judge(norm: Any) -> bool:
            if not answer:
                value = float(norm)
                # DeepSpeed's -1 says that a part of the norm is not finite.
                valid = math.isfinite(value) and value >= 0
                self.grad_norm = value if valid else None
                judged = value if valid else math.nan
                answer.append(above(judged, self.refuse_above) or not valid)
            return answer[0]

        def watched_step(*args: Any, **kwargs: Any) -> Any:
            answer.clear()
            if self.replicas > 1:
                for sums in optimizer.averaged_gradients.values():
                    torch._foreach_div_(list(sums), self.replicas)
            module.is_invalid_grad_norm = judge
            try:
                return step(*args, **kwargs)
            finally:
                module.is_invalid_grad_norm = is_invalid

        optimizer.step = watched_step
