"""Attention of Llama-style decoders: grouped-query attention with rotary positions, query and key
norms, sliding windows and sinks; and DeepSeek's latent attention.

Shapes: B batch, T tokens in a sequence (new ones, in generation), S tokens seen in all, D width, A
query heads, G key and value heads, H width of one head, V width of its values, C width of the
latent vector, R rotated units of a head.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from polyad.model.attention import Attention, AttentionTrace, LayerCache
from polyad.model.config import Config, Count
from polyad.model.initialization import ZEROS, Initializer, normal
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
    """The base class: queries, keys and values of any shape, then causal attention.

    Args:
        config: The model's `DecoderConfig`, which builds it and so is not imported here.
        window: Number of tokens that a token attends to, including itself; None for all earlier
            ones.
    """

    def __init__(self, config: Any, window: int | None) -> None:
        super().__init__(config.dropout)
        self.config, self.window = config, window
        self.head_size = config.known_head_size()
        has_sinks = config.attention_sinks
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if has_sinks else None
        scale = self.head_size**-0.5 if config.attention_scale is None else config.attention_scale
        self.scale = scale * (1.0 if config.rotary is None else logit_scale(config.rotary))

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of the sinks: zeros."""
        return {"sinks": ZEROS}

    @abstractmethod
    def heads(self, x_BTD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Computes queries [B, A, T, H], keys [B, G, T, H] and values [B, G, T, V].

        Args:
            x_BTD: Normalized input.
            rotation: Rotation of the tokens' positions; None if positions are learned.
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
        """Attends; see `SelfAttention.forward`.

        Args:
            x_BTD: Normalized input.
            traced_head: See there.
            cache: See there.
            mask_BT: Unused: padding comes last.
            rotation: See `heads`.
        """
        q_BATH, k_BGTH, v_BGTV = self.heads(x_BTD, rotation)
        k_BGSH, v_BGSV = (k_BGTH, v_BGTV) if cache is None else cache.append(k_BGTH, v_BGTV)
        heads_BATV = self.attend(q_BATH, k_BGSH, v_BGSV)
        if traced_head is None:
            return self.finish(heads_BATV, q_BATH, None)
        groups = q_BATH.shape[1] // k_BGTH.shape[1]
        expanded = (x.repeat_interleave(groups, 1) for x in (k_BGTH, v_BGTV))
        qkv_BT3AH = torch.stack((q_BATH, *expanded), 1).permute(0, 3, 1, 2, 4)
        return self.finish(heads_BATV, qkv_BT3AH, qkv_BT3AH.index_select(3, traced_head).squeeze(3))

    def attend(self, q_BATH: Tensor, k_BGSH: Tensor, v_BGSV: Tensor) -> Tensor:
        """Computes attention of the last T of S tokens to themselves and to earlier tokens.

        Args:
            q_BATH: Queries of the last tokens.
            k_BGSH: Keys; query head a uses key head a // (A / G).
            v_BGSV: Values.

        Returns:
            [B, A, T, V].
        """
        new, length = q_BATH.shape[2], k_BGSH.shape[2]
        window = length if self.window is None else min(self.window, length)
        seen_TS = None
        if self.sinks is not None or window < length or 1 < new < length:
            age_TS = (
                torch.arange(length - new, length, device=q_BATH.device).unsqueeze(1)
                - torch.arange(length, device=q_BATH.device)
            )  # fmt: skip
            seen_TS = (age_TS >= 0) & (age_TS < window)
        drop = self.dropout if self.training else 0.0
        with self.random_numbers() if drop else nullcontext():
            if self.sinks is not None:
                assert seen_TS is not None
                return attend_with_sinks(
                    q_BATH, k_BGSH, v_BGSV, seen_TS, self.sinks, self.scale, drop
                )
            # Values are padded with zeros to the width of keys: other widths have no fused kernel
            # on a CPU and only slower ones on a GPU. A single token does not need it.
            narrow = v_BGSV.shape[-1]
            missing = q_BATH.shape[-1] - narrow if new > 1 else 0
            heads_BATV = scaled_dot_product_attention(
                q_BATH,
                k_BGSH,
                pad(v_BGSV, (0, missing)) if missing > 0 else v_BGSV,
                attn_mask=seen_TS,
                dropout_p=drop,
                is_causal=seen_TS is None and new > 1,
                scale=self.scale,
                enable_gqa=q_BATH.shape[1] != k_BGSH.shape[1],
            )
            return heads_BATV[..., :narrow] if missing > 0 else heads_BATV


def attend_with_sinks(
    q_BATH: Tensor,
    k_BGSH: Tensor,
    v_BGSV: Tensor,
    seen_TS: Tensor,
    sinks_A: Tensor,
    scale: float,
    drop: float = 0.0,
) -> Tensor:
    """Computes attention with one extra logit per head whose weight goes to no token (gpt-oss).

    Args:
        q_BATH: Queries.
        k_BGSH: Keys.
        v_BGSV: Values.
        seen_TS: True where a token attends to another.
        sinks_A: The sink logit of each head.
        scale: Factor of the inner products.
        drop: Dropout probability of the attention weights.

    Returns:
        [B, A, T, V].
    """
    groups = q_BATH.shape[1] // k_BGSH.shape[1]
    k_BASH, v_BASV = (x.repeat_interleave(groups, 1) for x in (k_BGSH, v_BGSV))
    logits_BATS = (q_BATH @ k_BASH.mT) * scale
    logits_BATS = logits_BATS.masked_fill(~seen_TS, -math.inf)
    sink_BAT1 = sinks_A.view(1, -1, 1, 1).expand(*logits_BATS.shape[:-1], 1)
    weights_BATS = torch.cat((logits_BATS, sink_BAT1), -1).softmax(-1)[..., :-1]
    return dropout(weights_BATS, drop, training=drop > 0) @ v_BASV


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
        self.query_norm = self.key_norm = None
        if norm != "none":
            sizes = (of_queries, of_keys) if norm == "all" else (self.head_size,) * 2
            self.query_norm, self.key_norm = (RMSNorm(size, config.norm_epsilon) for size in sizes)
        self.projection = Linear(of_queries, width, end, bias=config.attention_output_bias)
        self.own_heads: Region = same
        """Selects the keys and values, [B, G, T, H], for this rank's queries, if ranks share the
        query heads of a key head and each has all keys."""

    def heads(self, x_BTD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `RotaryAttention.heads`."""
        norm_of, clip = self.config.query_key_norm, self.config.query_key_value_clip
        rotary = self.config.rotary
        parts = [self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)]
        norms: list[Callable[[Tensor], Tensor] | None] = [self.query_norm, self.key_norm, None]
        if norm_of == "all":
            parts = [x if norm is None else norm(x) for x, norm in zip(parts, norms, strict=True)]
        if clip is not None:
            parts = [x.clamp(-clip, clip) for x in parts]
        parts = [x.unflatten(-1, (-1, self.head_size)) for x in parts]
        if norm_of == "head":
            parts = [x if norm is None else norm(x) for x, norm in zip(parts, norms, strict=True)]
        assert (rotation is None) == (rotary is None)
        if rotation is not None and rotary is not None:
            # Before the transpose, so that fused attention reads and writes tokens in their order.
            of_token = Rotation(*(x_TR.unsqueeze(1) for x_TR in rotation))
            parts = [*(of_token.turn(x, rotary) for x in parts[:2]), parts[2]]
        q_BATH, k_BGTH, v_BGTH = (x.transpose(1, 2) for x in parts)
        return q_BATH, self.own_heads(k_BGTH), self.own_heads(v_BGTH)


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

    def heads(self, x_BTD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `RotaryAttention.heads`."""
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
        return torch.cat((plain_q, rotated_q), -1), torch.cat((plain_k, rotated_k), -1), v_BATV
