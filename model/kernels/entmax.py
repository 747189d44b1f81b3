"""The threshold of entmax-1.5.

Shapes: M tokens, N experts.
"""

import math

import torch
from torch import Tensor


def above_threshold(x_MN: Tensor) -> Tensor:
    """Computes max(x - tau, 0) with tau of each row such that the norm is 1; the highest x is 0.

    The norm is convex and decreasing in tau, so Newton steps from -1 never pass the root. Each step
    divides the product of the norm's excess and its slope by at least 4. It starts below N, and the
    slope is at least 1: n steps with 4^n >= N / epsilon suffice. All of them are always made, since
    a convergence test would synchronize with the device at each step.

    Args:
        x_MN: Values in fp32 or float64.

    Returns:
        A tensor of the same shape.
    """
    steps = math.ceil(math.log(x_MN.shape[-1] / torch.finfo(x_MN.dtype).eps, 4))
    tau_M1 = torch.full_like(x_MN[..., :1], -1.0)
    s_MN = (x_MN - tau_M1).clamp_(min=0)
    for _ in range(steps):
        norm_M1 = torch.linalg.vector_norm(s_MN, dim=-1, keepdim=True)
        excess_M1 = (norm_M1 - 1) * norm_M1
        tau_M1 = torch.addcdiv(tau_M1, excess_M1, s_MN.sum(-1, keepdim=True))
        s_MN = (x_MN - tau_M1).clamp_(min=0)
    return s_MN
