"""Attention of Llama-style decoders: grouped-query attention with rotary positions and query and
key norms; and DeepSeek's latent attention.

Shapes: B batch, T tokens in a sequence, D width, A query heads, G key and value heads, H width of
one head, V width of its values, C width of the latent vector, R rotated units of a head.
"""

from typing import Any

import torch
from torch import Tensor

from polyad.model.attention import Attention, Heads
from polyad.model.config import Config, Count
from polyad.model.initialization import normal
from polyad.model.layers import Linear, Region, RMSNorm, same
from polyad.model.rotary import Rotation, logit_scale

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
        size = config.known_head_size()
        scale = size**-0.5 if config.attention_scale is None else config.attention_scale
        super().__init__(
            config.dropout,
            window=window,
            scale=scale * (1.0 if config.rotary is None else logit_scale(config.rotary)),
            sinks=config.num_heads if config.attention_sinks else 0,
        )
        self.config, self.head_size = config, size


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
