"""The root of entmax-1.5, with all of Newton's steps in one kernel.

Shapes: M tokens, N experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 2048
"""That a program has at a time, unless a token has more experts."""


@torch.library.custom_op("polyad::entmax_root", mutates_args=())
def entmax_root(x_MN: Tensor, steps: int) -> Tensor:
    """max(x - tau, 0), with the tau that makes its squares sum to 1.

    Args:
        x_MN: In fp32, contiguous, the highest of each row 0.
        steps: Newton's, from tau = -1.

    Returns:
        [M, N].
    """
    tokens, experts = x_MN.shape
    block = triton.next_power_of_2(experts)
    rows = max(1, NUMBERS // block)
    s_MN = torch.empty_like(x_MN)
    _root_kernel[(triton.cdiv(tokens, rows),)](
        x_MN, s_MN, tokens, experts, STEPS=steps, ROWS=rows, BLOCK=block
    )
    return s_MN


@entmax_root.register_fake
def _like_entmax_root(x_MN: Tensor, steps: int) -> Tensor:
    return torch.empty_like(x_MN)


@triton.jit
def _root_kernel(
    x, s, tokens, experts, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)
    inside = (m < tokens)[:, None] & (n < experts)[None, :]
    place = m[:, None] * experts + n[None, :]
    values = tl.load(x + place, mask=inside, other=-float("inf"))
    tau = tl.full((ROWS,), -1.0, dtype=tl.float32)
    above = tl.maximum(values - tau[:, None], 0.0)
    for _ in range(STEPS):
        norm = tl.sqrt(tl.sum(above * above, 1))
        tau += (norm - 1) * norm / tl.sum(above, 1)
        above = tl.maximum(values - tau[:, None], 0.0)
    tl.store(s + place, above, mask=inside)
