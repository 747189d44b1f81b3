"""How the factors of experts start.

Shapes: N experts of a level, P and Q ring ranks before and after it.
"""

import torch
from torch import Generator, Tensor

from model.initialization import Initializer


def normal_around_one(scale: float = 1.0) -> Initializer:
    """N(1, 1), times a scale.

    Args:
        scale: Of mean and standard deviation.
    """
    return Initializer(lambda value, generator: value.normal_(scale, scale, generator=generator))


def _diagonal(value_NPQ: Tensor, generator: Generator) -> None:
    diagonal = torch.empty(value_NPQ.shape[0], min(value_NPQ.shape[1:]))
    value_NPQ.zero_().diagonal(dim1=1, dim2=2).copy_(
        diagonal.normal_(1.0, 1.0, generator=generator)
    )


# Each expert's slice [P, Q] is diagonal with independent N(1, 1) entries.
NORMAL_DIAGONAL = Initializer(_diagonal)
# Each expert's slice is the identity.
IDENTITY = Initializer(lambda value_NPQ, _: value_NPQ.zero_().diagonal(dim1=1, dim2=2).fill_(1.0))
