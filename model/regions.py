"""Regions: the places where ranks that share a layer exchange tensors.

A layer that can be split names its regions. Each is a differentiable function of a tensor, by
default the identity: model code is single-process. `parallelize` installs collectives there.
"""

from collections.abc import Callable

from torch import Tensor

Region = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """Returns its input: in one process there is nothing to exchange."""
    return x
