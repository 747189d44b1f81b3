"""The tensor of all experts' weights, written out from its definition one sum at a time."""

import string
from collections.abc import Sequence

import torch

from polyad.model.mumoe.config import FACTORIZATIONS
from polyad.model.mumoe.factorizations import Factorized, Sizes


def make_sizes(**changes) -> Sizes:
    sizes = {"num_experts": (5,), "inputs": 6, "outputs": 7, "rank": 3, "expert_rank": 2}
    return Sizes(**(sizes | {"bias": True} | changes))


def make_layer(name: str, dtype: torch.dtype = torch.float64, **changes) -> Factorized:
    """A layer whose factors are all random, so that no order of modes is as good as another."""
    layer = FACTORIZATIONS[name](make_sizes(**changes)).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def full_tensor(name: str, layer: Factorized) -> torch.Tensor:
    """W [N_1, ..., N_E, I (+ 1), O]."""
    factors = [*layer.expert_factors(), layer.input_factor, layer.output_factor]
    levels, ring = string.ascii_uppercase[: len(factors) - 2], string.ascii_lowercase
    if name == "cp":
        modes = [*(f"{level}r" for level in levels), "ir", "ro"]
    elif name == "tucker":
        factors.insert(0, layer.core)
        core = f"y{levels.lower()}z"
        modes = [core, *(f"{level}{level.lower()}" for level in levels), "iy", "zo"]
    else:  # Each element is the trace of a product of slices; the ring's letters are a, b, c, ...
        slices = [f"{level}{ring[k : k + 2]}" for k, level in enumerate(levels)]
        modes = [*slices, f"i{ring[len(levels)]}z", "azo"]
    return torch.einsum(f"{','.join(modes)}->{levels}io", *factors)


def contract(weight: torch.Tensor, z: torch.Tensor, coefficients: Sequence[torch.Tensor], bias):
    """W with every coefficient and [z, 1], as the paper writes it."""
    if bias:
        z = torch.cat([z, torch.ones_like(z[:, :1])], dim=1)
    levels = string.ascii_uppercase[: len(coefficients)]
    operands = ",".join(f"m{level}" for level in levels)
    return torch.einsum(f"{levels}io,{operands},mi->mo", weight, *coefficients, z)


def coefficients(sizes: Sizes, tokens: int, dtype=torch.float64) -> list[torch.Tensor]:
    return [torch.rand(tokens, number, dtype=dtype) for number in sizes.num_experts]
