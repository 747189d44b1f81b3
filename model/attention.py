"""Self-attention with PyTorch's fused kernel, windows and sinks; the key-value cache for
generation; grouped-query attention with rotary positions and query and key norms; and DeepSeek's
latent attention.

Shapes: B batch, T tokens in a sequence (new ones, in generation), S tokens seen in all, D width, A
heads, G heads of keys and values (A, or fewer), H width of one head, V width of its values (H, or
another), M = A H: D, or a part of it under tensor parallelism, C width of the latent vector, R
rotated units of a head.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from polyad.model.config import Config, Count
from polyad.model.initialization import ZEROS, Initializer, normal
from polyad.model.layers import Linear, Region, RMSNorm, same
from polyad.model.rotary import Rotation, logit_scale


class LayerCache:
    """Cached keys and values of one attention layer.

    Args:
        capacity: Maximum number of tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.length = 0
        self._capacity = capacity
        self._k_BATH = self._v_BATH = torch.empty(0)

    def append(self, k_BATH: Tensor, v_BATH: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values of new tokens.

        Args:
            k_BATH: Keys of the new tokens.
            v_BATH: Values of the new tokens, of any width.

        Returns:
            Keys and values of all tokens so far, [B, A, S, H] each: views, which the next call does
            not change.
        """
        batch, heads, new, width = k_BATH.shape
        if self.length == 0:
            self._k_BATH = k_BATH.new_empty(batch, heads, self._capacity, width)
            self._v_BATH = v_BATH.new_empty(batch, heads, self._capacity, v_BATH.shape[-1])
        stop = self.length + new
        self._k_BATH[:, :, self.length : stop] = k_BATH
        self._v_BATH[:, :, self.length : stop] = v_BATH
        self.length = stop
        return self._k_BATH[:, :, :stop], self._v_BATH[:, :, :stop]


class BlockCache:
    """The cache of one block.

    Args:
        capacity: Maximum number of tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.attention = LayerCache(capacity)
        self.feed_forward = LayerCache(capacity)
        """The cache of a router that mixes scores over tokens; empty for other routers."""


class KeyValueCache:
    """Cached keys and values of a whole model, for one batch of equally long sequences.

    Only for generation: no gradient flows to cached tokens, and dropout must be off.

    Args:
        num_layers: Number of blocks of the model.
        capacity: Maximum number of tokens, at most the model's `sequence_length`.
    """

    past: Any = None
    """What a model of another library keeps in place of these."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.blocks = [BlockCache(capacity) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Number of tokens that every block has seen."""
        return self.blocks[-1].attention.length


class AttentionTrace(NamedTuple):
    """Intermediate values of attention, for a router that reads them.

    Under tensor parallelism q, k, v and the weight are those of this rank's heads; the output is
    complete.
    """

    qkv_BT3AH: Tensor
    """q, k and v of all heads, detached in a model."""
    of_head_BT3H: Tensor
    """q, k and v of the head `traced_head`, with gradients."""
    output_BTD: Tensor
    """The output of attention, before dropout and the residual."""
    output_weight_DM: Tensor
    """The output projection; its M = A H columns are ordered by head."""
    output_bias_D: Tensor | None = None
    """The bias of the output projection, which is part of the output."""


class Heads(NamedTuple):
    """Queries, keys and values of new tokens, and those of a traced head."""

    q_BATH: Tensor
    k_BGTH: Tensor
    v_BGTV: Tensor
    qkv_BT3AH: Tensor | None = None
    """q, k and v of all heads in one tensor, if a class has them so and a head is traced."""
    of_head_BT3H: Tensor | None = None
    """q, k and v of the traced head; None if `qkv_BT3AH` is."""


class Attention(nn.Module, ABC):
    """The base class of attention: `heads` of any kind, then fused attention and a projection.

    Args:
        dropout: Dropout probability of the attention weights and of the output.
        sinks: Number of heads that each have an attention sink, a learned logit whose weight goes
            to no token.
    """

    projection: Linear
    """Projects all heads to the residual stream; the last layer that a subclass creates."""
    causal: bool = True
    """Whether a token attends to no later ones."""
    window: int | None = None
    """Number of tokens that a token attends to, including itself; None for all earlier ones."""
    scale: float | None = None
    """Factor of the products of queries and keys; None: 1 / sqrt(H)."""

    def __init__(self, dropout: float, sinks: int = 0) -> None:
        super().__init__()
        self.dropout = dropout
        self.sinks = nn.Parameter(torch.empty(sinks)) if sinks else None
        self.residual_dropout = nn.Dropout(dropout)
        self.random_numbers: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context around dropout of attention weights: ranks with other heads need other random
        numbers."""

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of the sinks: zeros."""
        return {"sinks": ZEROS}

    @abstractmethod
    def heads(self, x_BTD: Tensor, rotation: Rotation | None, traced_head: Tensor | None) -> Heads:
        """Computes queries, keys and values.

        Args:
            x_BTD: Normalized input.
            rotation: Rotation of the tokens' positions; None if positions are learned.
            traced_head: See `forward`.
        """

    def forward(
        self,
        x_BTD: Tensor,
        *,
        traced_head: Tensor | None = None,
        cache: LayerCache | None = None,
        mask_BT: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, AttentionTrace | None]:
        """Attends.

        Args:
            x_BTD: Normalized input.
            traced_head: [1], the index of a head of this rank whose q, k and v are returned; None
                returns none, so that all can be freed.
            cache: Keys and values of earlier tokens, to which those of these are added; None if
                there are no earlier tokens.
            mask_BT: True for tokens, False for padding, to which no token attends; None if there is
                no padding. Causal attention ignores it, since padding comes last.
            rotation: See `heads`.

        Returns:
            The output [B, T, D], before the residual, and the trace if there is a traced head.
        """
        q_BATH, k_BGTH, v_BGTV, qkv_BT3AH, of_head_BT3H = self.heads(x_BTD, rotation, traced_head)
        k_BGSH, v_BGSV = (k_BGTH, v_BGTV) if cache is None else cache.append(k_BGTH, v_BGTV)
        heads_BATV = self.attend(q_BATH, k_BGSH, v_BGSV, mask_BT)
        projected_BTD = self.projection(heads_BATV.transpose(1, 2).flatten(2))
        y_BTD = self.residual_dropout(projected_BTD)
        if traced_head is None:
            return y_BTD, None
        if qkv_BT3AH is None or of_head_BT3H is None:
            groups = q_BATH.shape[1] // k_BGTH.shape[1]
            expanded = (x.repeat_interleave(groups, 1) for x in (k_BGTH, v_BGTV))
            qkv_BT3AH = torch.stack((q_BATH, *expanded), 1).permute(0, 3, 1, 2, 4)
            of_head_BT3H = qkv_BT3AH.index_select(3, traced_head).squeeze(3)
        weight_DM, bias_D = self.projection.merged_weight(), self.projection.bias
        return y_BTD, AttentionTrace(
            qkv_BT3AH.detach(), of_head_BT3H, projected_BTD, weight_DM, bias_D
        )

    def attend(
        self, q_BATH: Tensor, k_BGSH: Tensor, v_BGSV: Tensor, mask_BT: Tensor | None = None
    ) -> Tensor:
        """Computes the attention of the last T of S tokens to the tokens that they may see.

        Args:
            q_BATH: Queries of the last tokens.
            k_BGSH: Keys of all; query head a uses key head a // (A / G).
            v_BGSV: Values of all.
            mask_BT: See `forward`.

        Returns:
            [B, A, T, V].
        """
        new, length = q_BATH.shape[2], k_BGSH.shape[2]
        window = length if self.window is None else min(self.window, length)
        seen = None
        if not self.causal:
            seen = None if mask_BT is None else mask_BT[:, None, None, :]
        elif self.sinks is not None or window < length or 1 < new < length:
            age_TS = (
                torch.arange(length - new, length, device=q_BATH.device).unsqueeze(1)
                - torch.arange(length, device=q_BATH.device)
            )  # fmt: skip
            seen = (age_TS >= 0) & (age_TS < window)
        drop = self.dropout if self.training else 0.0
        with self.random_numbers() if drop else nullcontext():
            if self.sinks is not None:
                assert seen is not None
                return self._attend_with_sinks(q_BATH, k_BGSH, v_BGSV, seen, drop)
            # Values are padded with zeros to the width of keys: other widths have no fused kernel
            # on a CPU and only slower ones on a GPU. A single token does not need it.
            narrow = v_BGSV.shape[-1]
            missing = q_BATH.shape[-1] - narrow if new > 1 else 0
            heads_BATV = scaled_dot_product_attention(
                q_BATH,
                k_BGSH,
                pad(v_BGSV, (0, missing)) if missing > 0 else v_BGSV,
                attn_mask=seen,
                dropout_p=drop,
                is_causal=self.causal and seen is None and new > 1,
                scale=self.scale,
                enable_gqa=q_BATH.shape[1] != k_BGSH.shape[1],
            )
            return heads_BATV[..., :narrow] if missing > 0 else heads_BATV

    def _attend_with_sinks(
        self, q_BATH: Tensor, k_BGSH: Tensor, v_BGSV: Tensor, seen_TS: Tensor, drop: float
    ) -> Tensor:
        """Attends with one extra logit per head whose weight goes to no token (gpt-oss).

        Args:
            q_BATH: Queries.
            k_BGSH: Keys.
            v_BGSV: Values.
            seen_TS: True where a token attends to another.
            drop: Dropout probability of the attention weights.

        Returns:
            [B, A, T, V].
        """
        assert self.sinks is not None
        groups = q_BATH.shape[1] // k_BGSH.shape[1]
        k_BASH, v_BASV = (x.repeat_interleave(groups, 1) for x in (k_BGSH, v_BGSV))
        scale = q_BATH.shape[-1] ** -0.5 if self.scale is None else self.scale
        logits_BATS = ((q_BATH @ k_BASH.mT) * scale).masked_fill(~seen_TS, -math.inf)
        sink_BAT1 = self.sinks.view(1, -1, 1, 1).expand(*logits_BATS.shape[:-1], 1)
        weights_BATS = torch.cat((logits_BATS, sink_BAT1), -1).softmax(-1)[..., :-1]
        return dropout(weights_BATS, drop, training=drop > 0) @ v_BASV


class SelfAttention(Attention):
    """Multi-head attention, causal or, in an encoder or vision model, bidirectional.

    The fused weight is stored as [3, A, H, D] flattened to [3D, D]: all queries, all keys, all
    values, each ordered by head (GPT-2's order; transformers' `c_attn.weight` is its transpose).
    To split it over ranks, split the A dimension, not the rows.

    Args:
        context: The `FeedForwardContext` of the model, whose file imports this one; D is a
            multiple of A.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(context.dropout)
        self.causal = context.causal
        assert context.num_heads is not None
        width = context.hidden_size
        self.head_size = width // context.num_heads
        start, end = normal(context.initializer_std), normal(context.residual_std)
        self.qkv = Linear(width, 3 * width, start, bias=context.bias)
        self.projection = Linear(width, width, end, bias=context.bias)

    def heads(self, x_BTD: Tensor, rotation: Rotation | None, traced_head: Tensor | None) -> Heads:
        """Returns heads of one product for queries, keys and values; positions are learned."""
        qkv_BTM = self.qkv(x_BTD)
        # Not the shapes of x or A: a rank may have only some of the tokens there, and some of the
        # heads.
        batch, length, _ = qkv_BTM.shape
        heads = qkv_BTM.shape[-1] // (3 * self.head_size)  # -1 fails without images
        qkv_BT3AH = qkv_BTM.view(batch, length, 3, heads, self.head_size)
        # Split as stored, so that the kernel's three gradients become that of qkv in one pass.
        of_head_BT3H = None
        if traced_head is None:
            parts = qkv_BT3AH.unbind(2)
        else:
            *parts, of_head_BT3H = _Traced.apply(qkv_BT3AH, traced_head)  # type: ignore[no-untyped-call]
        q_BATH, k_BATH, v_BATH = (part_BTAH.transpose(1, 2) for part_BTAH in parts)
        return Heads(q_BATH, k_BATH, v_BATH, qkv_BT3AH, of_head_BT3H)


class _Traced(torch.autograd.Function):
    """Returns q, k and v of all heads, and a copy of those of one head.

    Its backward pass adds the gradient of the one head to that of all in place. Autograd would
    build a gradient of all heads that is zero for the others.
    """

    @staticmethod
    def forward(ctx: Any, qkv_BT3AH: Tensor, head: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(head)
        return *qkv_BT3AH.unbind(2), qkv_BT3AH.index_select(3, head).squeeze(3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (head,) = ctx.saved_tensors
        *of_all_BTAH, of_head_BT3H = gradients
        whole_BT3AH = torch.stack(of_all_BTAH, 2)
        return whole_BT3AH.index_add_(3, head, of_head_BT3H.unsqueeze(3)), None


_LATENT_EPSILON = 1e-6
"""Epsilon of the norms inside latent attention, independent of the model's own."""


class LatentConfig(Config):
    """Multi-head latent attention: keys and values of all heads are projected from one narrow
    vector.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
    """

    key_value_rank: Count
    """Width C of the latent vector of keys and values, in units."""
    query_rank: Count | None = None
    """Width of the latent vector of queries, in units; null: queries are projected directly."""
    plain_size: Count
    """Number of units per head of queries and keys that are not rotated."""
    rotated_size: Count
    """Number of units per head of queries and keys that are rotated; all heads share the rotated
    units of the key."""
    value_size: Count
    """Number of units per head of values."""


class RotaryAttention(Attention):
    """The base class: causal attention as a `DecoderConfig` describes it.

    Args:
        config: The model's `DecoderConfig`, which builds it and so is not imported here.
        window: See `Attention`.
    """

    def __init__(self, config: Any, window: int | None) -> None:
        super().__init__(config.dropout, config.num_heads if config.attention_sinks else 0)
        self.config, self.head_size, self.window = config, config.known_head_size(), window
        scale = config.attention_scale
        scale = self.head_size**-0.5 if scale is None else scale
        self.scale = scale * (1.0 if config.rotary is None else logit_scale(config.rotary))


class GroupedAttention(RotaryAttention):
    """Grouped-query attention (Ainslie et al. 2023): G key and value heads for A query heads.

    Args:
        config: See `RotaryAttention`.
        window: See `RotaryAttention`.
    """

    def __init__(self, config: Any, window: int | None) -> None:
        super().__init__(config, window)
        start, end = normal(config.initializer_range), normal(config.residual_std())
        width, bias, norm = config.hidden_size, config.attention_bias, config.query_key_norm
        of_queries = config.num_heads * self.head_size
        of_keys = config.known_key_value_heads() * self.head_size
        self.query = Linear(width, of_queries, start, bias=bias)
        self.key = Linear(width, of_keys, start, bias=bias)
        self.value = Linear(width, of_keys, start, bias=bias)
        self.query_norm: Any = None
        self.key_norm: Any = None
        if norm != "none":
            sizes = (of_queries, of_keys) if norm == "all" else (self.head_size,) * 2
            self.query_norm, self.key_norm = (RMSNorm(size, config.norm_epsilon) for size in sizes)
        self.projection = Linear(of_queries, width, end, bias=config.attention_output_bias)
        self.own_heads: Region = same
        """Selects the keys and values, [B, G, T, H], for this rank's queries, if ranks share the
        query heads of a key head and each has all keys."""

    def heads(self, x_BTD: Tensor, rotation: Rotation | None, traced_head: Tensor | None) -> Heads:
        """Returns rotated queries and keys, each key head read by several query heads."""
        norm_of, clip = self.config.query_key_norm, self.config.query_key_value_clip
        rotary = self.config.rotary
        q, k, v = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        if norm_of == "all":
            q, k = self.query_norm(q), self.key_norm(k)
        if clip is not None:
            q, k, v = (x.clamp(-clip, clip) for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (-1, self.head_size)) for x in (q, k, v))
        if norm_of == "head":
            q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            # Before the transpose, so that fused attention reads and writes tokens in their order.
            of_token = Rotation(*(x_TR.unsqueeze(1) for x_TR in rotation))
            q, k = of_token.turn(q, rotary), of_token.turn(k, rotary)
        q_BATH, k_BGTH, v_BGTH = (x.transpose(1, 2) for x in (q, k, v))
        return Heads(q_BATH, self.own_heads(k_BGTH), self.own_heads(v_BGTH))


class LatentAttention(RotaryAttention):
    """Multi-head latent attention; see `LatentConfig`.

    Args:
        config: See `RotaryAttention`.
        window: See `RotaryAttention`.
    """

    def __init__(self, config: Any, window: int | None) -> None:
        super().__init__(config, window)
        start, end = normal(config.initializer_range), normal(config.residual_std())
        latent = config.latent_attention
        assert latent is not None
        self.latent, bias = latent, config.attention_bias
        width, heads, rank = config.hidden_size, config.num_heads, latent.key_value_rank
        of_queries = heads * self.head_size
        if latent.query_rank is None:
            self.query = Linear(width, of_queries, start, bias=False)
        else:
            self.query_down = Linear(width, latent.query_rank, start, bias=bias)
            self.query_norm = RMSNorm(latent.query_rank, _LATENT_EPSILON)
            self.query_up = Linear(latent.query_rank, of_queries, start, bias=False)
        self.shared_key: Region = same
        """Applied to the rotated part of the key; each rank has the gradient of its own heads."""
        self.key_value_down = Linear(width, rank + latent.rotated_size, start, bias=bias)
        self.key_value_norm = RMSNorm(rank, _LATENT_EPSILON)
        of_both = heads * (latent.plain_size + latent.value_size)
        self.key_value_up = Linear(rank, of_both, start, bias=False)
        self.projection = Linear(
            heads * latent.value_size, width, end, bias=config.attention_output_bias
        )

    def heads(self, x_BTD: Tensor, rotation: Rotation | None, traced_head: Tensor | None) -> Heads:
        """Returns heads whose keys and values come from one latent vector per token."""
        latent, rotary = self.latent, self.config.rotary
        assert rotation is not None
        assert rotary is not None
        if latent.query_rank is None:
            q_BTM = self.query(x_BTD)
        else:
            q_BTM = self.query_up(self.query_norm(self.query_down(x_BTD)))
        q_BATH = q_BTM.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        plain_q, rotated_q = q_BATH.split([latent.plain_size, latent.rotated_size], -1)
        c_BTC, rotated_k = self.key_value_down(x_BTD).split(
            [latent.key_value_rank, latent.rotated_size], -1
        )
        rotated_k = self.shared_key(rotated_k)
        both = self.key_value_up(self.key_value_norm(c_BTC)).unflatten(
            -1, (-1, latent.plain_size + latent.value_size)
        )
        plain_k, v_BATV = both.transpose(1, 2).split([latent.plain_size, latent.value_size], -1)
        rotated_q = rotation.turn(rotated_q, rotary)
        rotated_k = rotation.turn(rotated_k.unsqueeze(1), rotary).expand_as(rotated_q)
        q_BATH, k_BATH = (
            torch.cat(parts, -1) for parts in ((plain_q, rotated_q), (plain_k, rotated_k))
        )
        return Heads(q_BATH, k_BATH, v_BATV)
