"""Entropy of what a router or a gate decided."""

import torch
from torch import Tensor


def entropy(shares: Tensor) -> Tensor:
    """Entropy over the last dimension, in nats; not for gradients.

    Args:
        shares: Not negative, each row summing to 1; 0 is allowed.

    Returns:
        One dimension less.
    """
    # 0 log 0 counts as 0. xlogy does the same, but takes nine times as long on a CPU.
    tiny = torch.finfo(shares.dtype).tiny
    return shares.clamp_min(tiny).log_().mul_(shares).sum(-1).neg_()
