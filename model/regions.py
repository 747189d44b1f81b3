"""Regions: the places where processes that share a layer exchange numbers.

A layer that can be cut names its regions. Each is a function of a tensor, with a gradient, and by
default the identity: model code knows one process. `parallelize` puts collectives there.
"""

from collections.abc import Callable

from torch import Tensor

Region = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """Returns what it is given: in one process there is nothing to exchange."""
    return x
