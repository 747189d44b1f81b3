"""The tensors of a dense feed-forward as those of groups of its units, and back, bitwise.

Shapes: U inner units, E experts, F units of one, D width.
"""

import torch
from torch import Tensor

DENSE_NAMES = {
    "experts.keys": "up.weight",
    "experts.bias": "up.bias",
    "experts.values": "down.weight",
    "output_bias": "down.bias",
}
"""Of each tensor of a split feed-forward, where in the dense one its numbers are."""
OF_UNITS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
"""Of each dense tensor the axis of units; what is not here has none."""


def unit_order(group_U: Tensor) -> Tensor:
    """The order of units in which those of a group stand together.

    Args:
        group_U: The group of each unit, from 0.

    Returns:
        [U], of each place the number of its unit; in a group they stay as they were.
    """
    return group_U.argsort(stable=True)


def split(name: str, dense: Tensor, unit_U: Tensor, num_experts: int) -> Tensor:
    """A tensor of the split feed-forward.

    Args:
        name: Of the dense tensor, as `up.weight`.
        dense: It.
        unit_U: See `unit_order`.
        num_experts: E.

    Returns:
        Keys or values [E, F, D], biases of units [E, F], or the output's bias [D].
    """
    if name not in OF_UNITS:
        return dense
    rows = dense.movedim(OF_UNITS[name], 0)[unit_U]
    return rows.reshape(num_experts, -1, *rows.shape[1:])


def merge(name: str, stacked: Tensor, unit_U: Tensor) -> Tensor:
    """A tensor of the dense feed-forward: what `split` made its argument of.

    Args:
        name: Of the dense tensor.
        stacked: Of the split feed-forward.
        unit_U: See `unit_order`.
    """
    if name not in OF_UNITS:
        return stacked
    rows = stacked.flatten(0, 1)
    dense = torch.empty_like(rows)
    dense[unit_U] = rows
    return dense.movedim(0, OF_UNITS[name]).contiguous()
