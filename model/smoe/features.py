"""What a graph's S is made of.

Shapes: B batch, T tokens in a sequence, F width of the features, E experts, M rows that are
measured.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from model.smoe.scores import wide

MEASURED_ROWS = 32
"""Query rows of a sequence that entropies are measured at: exact there, a sample of all."""


class Features(NamedTuple):
    """S_ij is the softmax over j of scale * query_i . key_j."""

    query_BTF: Tensor
    key_BTF: Tensor | None
    """None: the queries."""
    scale: float = 1.0
    normalized: bool = False
    """Whether each is divided by its length first."""

    def in_full(self) -> tuple[Tensor, Tensor]:
        """Query and key, divided by their lengths if that is asked for, in routing's precision."""
        query_BTF = self._in_full(self.query_BTF)
        return query_BTF, query_BTF if self.key_BTF is None else self._in_full(self.key_BTF)

    def _in_full(self, x_BTF: Tensor) -> Tensor:
        x_BTF = x_BTF.to(wide(x_BTF.dtype))
        return normalize(x_BTF, dim=-1) if self.normalized else x_BTF


class Mixing(NamedTuple):
    """A mixture that is asked for: p = S r."""

    features: Features
    value_BTE: Tensor
    """r, in fp32 at least; everything is computed in its precision."""
    causal: bool
    """Whether a token sees itself and those before it alone."""
    entropy_BT: Tensor | None = None
    """Of each token's scores, if one sees those with no more than its own alone."""


def measured_rows(length: int, device: torch.device) -> Tensor:
    """Rows spread evenly over a sequence, the last one among them.

    Args:
        length: T.
        device: Where the result is to be.

    Returns:
        [M], M = min(T, MEASURED_ROWS).
    """
    count = min(length, MEASURED_ROWS)
    return (torch.arange(1, count + 1, device=device) * length).div(
        count, rounding_mode="floor"
    ) - 1
