"""Where a block would talk to other processes, if they had parts of its factors.

In one process nothing happens here. `parallel/factors.py` puts others in place, which exchange what
the text of each method says; what is computed stays the same.

Shapes: M tokens, S experts of all levels, N experts of a level, D width.
"""

from torch import Tensor


class LayerExchange:
    """Around the products of one factorized layer."""

    def enter(self, z: Tensor) -> Tensor:
        """What goes into the input factor: whole, or this process's units."""
        return z

    def before_mixing(self, contracted: Tensor) -> Tensor:
        """The input with the input factor."""
        return contracted

    def after_mixing(self, mixed: Tensor) -> Tensor:
        """That with the coefficients, before the output factor."""
        return mixed

    def leave(self, y: Tensor) -> Tensor:
        """What comes out of the output factor: whole, or this process's units."""
        return y

    def shared(self, x: Tensor) -> Tensor:
        """What every process computes alike, and then multiplies by a part of something."""
        return x

    def whole(self, factor: Tensor) -> Tensor:
        """A factor of which every process keeps a part and needs all."""
        return factor


class GateExchange:
    """Around the gate of a block."""

    def enter(self, u_MD: Tensor) -> Tensor:
        """What the gate reads."""
        return u_MD

    def whole(self, weight_SD: Tensor) -> Tensor:
        """The gate's weight, of which every process keeps a part and needs all."""
        return weight_SD

    def leave(self, coefficients_MN: Tensor) -> Tensor:
        """The coefficients of a level."""
        return coefficients_MN
