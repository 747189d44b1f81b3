"""Initial values of expert factors: around one, closer to it for further levels.

Shapes: N experts of a level, P and Q ring ranks before and after it.
"""

import torch
from torch import Generator, Tensor

from polyad.model.initialization import Initializer


def around_one(std: float = 1.0, scale: float = 1.0) -> Initializer:
    """Every entry N(1, std^2), times a scale.

    Args:
        std: Standard deviation, before scaling.
        scale: Of mean and standard deviation.
    """
    return Initializer(
        lambda value, generator: value.normal_(scale, scale * std, generator=generator)
    )


def diagonal_around_one(std: float = 1.0) -> Initializer:
    """Each expert's slice [P, Q] is diagonal, with independent N(1, std^2) entries.

    Args:
        std: Standard deviation; 0 gives the identity.
    """

    def fill(value_NPQ: Tensor, generator: Generator) -> None:
        diagonal = torch.empty(value_NPQ.shape[0], min(value_NPQ.shape[1:]))
        value_NPQ.zero_().diagonal(dim1=1, dim2=2).copy_(
            diagonal.normal_(1.0, std, generator=generator)
        )

    return Initializer(fill)
