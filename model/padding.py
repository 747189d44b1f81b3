"""Real tokens of a padded micro-batch: padding is removed before the experts.

Sequences are padded on the right. Token-wise computations may include padding, whose results are
never read; routing uses only the real rows, so that padding reaches no expert and no statistic.

Shapes: B batch, T tokens in a sequence with its padding, M = B T rows, N real ones of them, D
width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class RealTokens(NamedTuple):
    """The real tokens of a batch."""

    mask_BT: Tensor
    """True for real tokens."""
    rows_N: Tensor
    """Their row numbers among the B T rows, ascending."""

    @classmethod
    def of(cls, mask_BT: Tensor | None) -> "RealTokens | None":
        """Finds the real tokens, once per forward pass, since a GPU has to synchronize for their
        number.

        Args:
            mask_BT: True for real tokens; None if all are real.

        Returns:
            The real tokens; None if `mask_BT` is None.
        """
        if mask_BT is None:
            return None
        return cls(mask_BT, mask_BT.flatten().nonzero().squeeze(1))

    @property
    def lengths_B(self) -> Tensor:
        """Number of real tokens in each sequence."""
        return self.mask_BT.sum(1)


def counted(real: RealTokens, dtype: torch.dtype) -> Tensor:
    """Returns the number of real tokens as a scalar tensor, for `RoutingStats.tokens`.

    Args:
        real: The tokens.
        dtype: The precision of the statistics.
    """
    return real.mask_BT.sum().to(dtype)


def pack(x_MD: Tensor, real: RealTokens | None) -> Tensor:
    """Selects the rows of real tokens, [N, D].

    Args:
        x_MD: Rows of all tokens.
        real: The real tokens; None if all are real.
    """
    return x_MD if real is None else x_MD.index_select(0, real.rows_N)


def unpack(y_ND: Tensor, real: RealTokens | None) -> Tensor:
    """Restores the rows of all tokens, [M, D], with zeros for padding.

    Args:
        y_ND: Rows of real tokens.
        real: The real tokens; None if all are real.
    """
    if real is None:
        return y_ND
    whole_MD = y_ND.new_zeros(real.mask_BT.numel(), *y_ND.shape[1:])
    return whole_MD.index_copy(0, real.rows_N, y_ND)


class LastToken(nn.Module):
    """Selects the vector of the last real token of each sequence.

    A module, so that sequence parallelism can give it all tokens.
    """

    def forward(self, x_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Selects them, [B, D].

        Args:
            x_BTD: The vectors of all tokens.
            mask_BT: True for real tokens, which precede the padding; None if all are real.
        """
        if mask_BT is None:
            return x_BTD[:, -1]
        last_B = mask_BT.sum(1) - 1
        return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), last_B]
