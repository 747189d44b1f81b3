"""What the processor can do."""

import functools

import torch


@functools.cache
def has_bf16_products() -> bool:
    """Whether this processor has instructions that PyTorch's products in bf16 use."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def has_tiles() -> bool:
    """Whether it multiplies whole tiles of bf16 (Intel's AMX)."""
    return has_bf16_products() and bool(torch.cpu._is_amx_tile_supported())
