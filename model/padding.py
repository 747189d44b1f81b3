"""Means over tokens that leave padding out.

Shapes: N tokens of all sequences.
"""

import torch
from torch import Tensor


def token_mean(values: Tensor, real_N: Tensor | None) -> Tensor:
    """The mean over tokens, of a sum that padding adds nothing to.

    Args:
        values: [N, ...].
        real_N: True for tokens, False for padding; None: there is none.

    Returns:
        [...]; zeros where all is padding.
    """
    if real_N is None:
        return values.mean(0)
    real = real_N.view(-1, *(1,) * (values.dim() - 1))
    # Selected, not multiplied: what was computed for padding need not be finite.
    return torch.where(real, values, 0).sum(0) / real_N.sum().clamp_min(1)
