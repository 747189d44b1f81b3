"""What the processor can do."""

import functools

import torch


@functools.cache
def has_bf16_products() -> bool:
    """Whether this processor has instructions that PyTorch's products in bf16 use."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())
