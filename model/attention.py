"""Causal self-attention over PyTorch's fused kernel.

Shapes: B batch, T tokens in a sequence, D width, A heads, H width of one head, M = A H:
D, or a part of it under tensor parallelism.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from model.cache import LayerCache, attend_cached
from model.initialization import Initializer, linear_initializers


class AttentionTrace(NamedTuple):
    """What attention did, for a router that reads it.

    Under tensor parallelism q, k, v and the weight are those of this process's heads; the output is
    whole.
    """

    q_BATH: Tensor
    k_BATH: Tensor
    v_BATH: Tensor
    output_BTD: Tensor
    """What attention adds to the residual stream, without the output projection's bias and before
    dropout; fp32 at least."""
    output_weight_DM: Tensor
    """The output projection; its M = A H columns are ordered by head."""


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and what came before.

    The fused weight is stored as [3, A, H, D] flattened to [3D, D]: all queries, all keys, all
    values, each ordered by head (GPT-2's order; transformers' `c_attn.weight` is its transpose).
    Splitting it over processes therefore splits the A dimension and not the rows.

    Args:
        hidden_size: D, a multiple of num_heads.
        num_heads: A.
        bias: Whether both projections have one.
        dropout: Probability, of the attention weights and of the output.
        initializer_std: Of the fused weight.
        residual_std: Of the output projection's weight.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        bias: bool,
        dropout: float,
        initializer_std: float,
        residual_std: float,
    ) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.dropout = dropout
        self.initializer_std = initializer_std
        self.residual_std = residual_std
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.projection = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.residual_dropout = nn.Dropout(dropout)
        # Tensor parallelism puts its own here: processes with other heads drop other weights.
        self.own_random_numbers: Callable[[], AbstractContextManager[None]] = nullcontext

    def initializers(self) -> dict[str, Initializer]:
        """Says how each parameter starts; see `model/initialization.py`."""
        return {
            **linear_initializers("qkv", self.qkv, self.initializer_std),
            **linear_initializers("projection", self.projection, self.residual_std),
        }

    def forward(
        self, x_BTD: Tensor, *, need_trace: bool = False, cache: LayerCache | None = None
    ) -> tuple[Tensor, AttentionTrace | None]:
        """Attends.

        Args:
            x_BTD: Normalized input.
            need_trace: Whether to hand out q, k, v and the output; otherwise they can be freed.
            cache: The tokens before these, to which these are added; None: there are none.

        Returns:
            The output [B, T, D], before the residual, and what attention did if asked for.
        """
        batch, length, _ = x_BTD.shape
        # -1 and not A: under tensor parallelism a process holds some of the heads.
        qkv_BT3AH = self.qkv(x_BTD).view(batch, length, 3, -1, self.head_size)
        q_BATH, k_BATH, v_BATH = qkv_BT3AH.permute(2, 0, 3, 1, 4).unbind(0)
        drop = self.dropout if self.training else 0.0
        if cache is not None:
            heads_BATH = attend_cached(q_BATH, k_BATH, v_BATH, cache)
        else:
            with self.own_random_numbers() if drop else nullcontext():
                heads_BATH = scaled_dot_product_attention(
                    q_BATH, k_BATH, v_BATH, dropout_p=drop, is_causal=True
                )
        merged_BTD = heads_BATH.transpose(1, 2).reshape(batch, length, -1)
        projected_BTD = self.projection(merged_BTD)
        y_BTD = self.residual_dropout(projected_BTD)
        if not need_trace:
            return y_BTD, None
        wide = torch.promote_types(projected_BTD.dtype, torch.float32)
        output_BTD, bias_D = projected_BTD.to(wide), self.projection.bias
        if bias_D is not None:
            output_BTD = output_BTD - bias_D.to(wide)
        trace = AttentionTrace(q_BATH, k_BATH, v_BATH, output_BTD, self.projection.weight)
        return y_BTD, trace
