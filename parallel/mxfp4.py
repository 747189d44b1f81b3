"""4-bit weights with one scale per 32 of them, as gpt-oss stores them (MXFP4).

A matrix `name` [E, in, out] is stored as `name_blocks` uint8 [E, out, in / 32, 16], low nibble
first, and `name_scales` uint8 [E, out, in / 32], exponents of two with a bias of 127.

Source: Open Compute Project 2023, "OCP microscaling formats (MX) specification", version 1.0.
"""

import functools
from typing import Any

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
_BYTES = 16
"""Bytes of a block of 32 values."""
_HALF = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_VALUES = torch.cat((_HALF, -_HALF))
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), -1)
"""Both values of each byte, [256, 2]."""


@functools.cache
def _pairs_of_scales() -> Tensor:
    """Returns both bf16 values of each byte with each scale, as one int32: [256 * 256]."""
    pairs = _PAIRS.to(torch.bfloat16).repeat(256, 1)
    exponents = torch.arange(256).repeat_interleave(256).unsqueeze(-1).expand_as(pairs) - 127
    return torch.ldexp(pairs, exponents).view(torch.int32).flatten()


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values, each exact in bf16.

    Args:
        blocks: [..., in / 32, 16].
        scales: [..., in / 32].

    Returns:
        [..., in] in bf16.
    """
    # A lookup takes a fortieth of the time of multiplying.
    number = torch.add(blocks.int(), scales.int().unsqueeze(-1), alpha=256)
    found = _pairs_of_scales().index_select(0, number.flatten())
    return found.view(torch.bfloat16).view(*scales.shape[:-1], -1)


def fault_of_pair(blocks: Any, scales: Any) -> str | None:
    """Returns why two mapped tensors are not the blocks and scales of one matrix; None if they are.

    Args:
        blocks: The mapped tensor `name_blocks`.
        scales: The mapped tensor `name_scales`.
    """
    shape = blocks.get_shape()
    if blocks.get_dtype() != "U8" or len(shape) != 4 or shape[-1] != _BYTES:
        form = f"U8 [experts, out, in / 32, {_BYTES}]"
        return f"{BLOCKS} is {blocks.get_dtype()} {shape}, but MXFP4 has {form}"
    if scales.get_dtype() != "U8" or scales.get_shape() != shape[:-1]:
        found = f"{scales.get_dtype()} {scales.get_shape()}"
        return f"{SCALES} is {found}, but {BLOCKS} {shape} needs U8 {shape[:-1]}"
    return None


class Quantized:
    """A matrix of such weights, with the interface of a mapped tensor.

    Args:
        blocks: The mapped tensor `name_blocks`.
        scales: The mapped tensor `name_scales`, which fits them (`fault_of_pair`).
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        """Returns [E, in, out]."""
        experts, out, groups, half = self._blocks.get_shape()
        return [experts, groups * 2 * half, out]

    def get_dtype(self) -> str:
        """The type of the values."""
        return "BF16"

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        """A part of the values: of these experts and outputs all inputs are read."""
        experts, inputs, outputs = box
        return torch.cat([
            dequantize(
                self._blocks[expert : expert + 1, outputs],
                self._scales[expert : expert + 1, outputs],
            )[..., inputs]
            for expert in range(self.get_shape()[0])[experts]
        ]).mT  # fmt: skip
