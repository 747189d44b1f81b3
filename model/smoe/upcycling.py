"""Sparse upcycling: makes each expert a copy of a trained dense feed-forward.

    up_e = up + noise * std(up) * n_e        n_e standard normal, separate for each expert e

down and the gate are treated alike.

With K > 1 and renormalized weights, these sum to 1, so the output equals that of the dense
feed-forward whichever experts are selected. With K = 1, or `combine: softmax`, weights are scores
and do not sum to 1.

Source: Komatsuzaki et al. 2023, "Sparse upcycling: training mixture-of-experts from dense
checkpoints".

Shapes: E experts.
"""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from polyad.model.initialization import seeded_generator

_COPIED = {
    "experts.up": ("up.weight", True),
    "experts.up_bias": ("up.bias", False),
    "experts.gate": ("gate.weight", True),
    "experts.gate_bias": ("gate.bias", False),
    "experts.down": ("down.weight", True),
    "output_bias": ("down.bias", False),
}


class DenseTensor(NamedTuple):
    """The parameter of a dense model that is copied into the experts."""

    name: str
    is_weight: bool
    """True for a matrix, which experts store transposed and which may get noise; else a bias."""


def dense_tensor(name: str) -> DenseTensor | None:
    """Finds the dense parameter from which a parameter of a sparse layer is copied.

    Args:
        name: The parameter's name in the sparse model, as in `named_parameters`.

    Returns:
        The dense parameter; None if it is not copied: a router's, or outside of sparse layers.
    """
    parts = re.fullmatch(r"(blocks\.\d+\.\w*feed_forward)\.(.+)", name)
    if parts is None or parts[2] not in _COPIED:
        return None
    dense, is_weight = _COPIED[parts[2]]
    return DenseTensor(f"{parts[1]}.{dense}", is_weight)


def copies(value: Tensor, num_experts: int, noise: float, seed: int, name: str) -> Tensor:
    """Stacks copies of a parameter, each with its own noise.

    Args:
        value: The parameter of one expert, in its orientation.
        num_experts: E.
        noise: Standard deviation of the noise, relative to that of the values; with 0 nothing is
            drawn.
        seed: The seed of the noise.
        name: Name of the stacked parameter, on which the noise depends too.

    Returns:
        [E, ...], fp32. At most one expert's noise is in memory besides it.
    """
    stacked = torch.empty((num_experts, *value.shape), dtype=torch.float32)
    stacked.copy_(value)
    if noise:
        scale = noise * value.std(correction=0)
        for expert in range(num_experts):
            generator = seeded_generator(seed, f"{name}/noise", expert)
            stacked[expert] += scale * torch.randn(value.shape, generator=generator)
    return stacked
