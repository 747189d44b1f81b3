"""Keys and values of the tokens so far, so that generation computes only those of a new token.

Shapes: B batch, T tokens that are new, S tokens seen in all, A heads, H width of one head.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class LayerCache:
    """Keys and values of one attention.

    Args:
        capacity: Tokens that there is room for.
    """

    def __init__(self, capacity: int) -> None:
        self.length = 0
        self._capacity = capacity
        self._k_BATH = self._v_BATH = torch.empty(0)

    def append(self, k_BATH: Tensor, v_BATH: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values of new tokens.

        Args:
            k_BATH: Their keys.
            v_BATH: Their values, of any width.

        Returns:
            Keys and values of all tokens so far, [B, A, S, H] each: views that the next call
            leaves as they are.
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
        capacity: Tokens that there is room for.
    """

    def __init__(self, capacity: int) -> None:
        self.attention = LayerCache(capacity)
        self.feed_forward = LayerCache(capacity)
        """The cache of a router that mixes scores over tokens; others leave it empty."""


class KeyValueCache:
    """Keys and values of a whole model, for one batch of equally long sequences.

    For generation alone: no gradient flows to tokens in it, and dropout has to be off.

    Args:
        num_layers: Of the model.
        capacity: Tokens that there is room for, at most the model's `sequence_length`.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.blocks = [BlockCache(capacity) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens that every block has seen."""
        return self.blocks[-1].attention.length


def attend_cached(
    q_BATH: Tensor,
    k_BATH: Tensor,
    v_BATH: Tensor,
    cache: LayerCache,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of new tokens to those before them and to themselves.

    Args:
        q_BATH: The new tokens' queries.
        k_BATH: Their keys.
        v_BATH: Their values.
        cache: Keys and values of the tokens before them, to which theirs are added.
        scale: Of the inner products; None: 1 / sqrt(H).

    Returns:
        [B, A, T, H].
    """
    before, new = cache.length, q_BATH.shape[2]
    k_BASH, v_BASH = cache.append(k_BATH, v_BATH)
    if before == 0:
        return scaled_dot_product_attention(q_BATH, k_BASH, v_BASH, is_causal=True, scale=scale)
    seen_TS = None  # a single new token sees all tokens
    if new > 1:  # new token i sees the cached tokens and new tokens 0 to i
        seen_TS = q_BATH.new_ones(new, before + new, dtype=torch.bool).tril(before)
    return scaled_dot_product_attention(q_BATH, k_BASH, v_BASH, attn_mask=seen_TS, scale=scale)
