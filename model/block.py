"""One transformer block: normalize before each branch and add after it, or the other way round.

Shapes: B batch, T tokens in a sequence, D width.
"""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyad.model.attention import SelfAttention
from polyad.model.initialization import Initializer, norm_initializers
from polyad.model.interface import NOTHING_ELSE, BlockInput, FeedForward
from polyad.model.layers import DropPath, LayerNorm
from polyad.model.output import RoutingStats

Recompute: TypeAlias = Literal["none", "block"]


class Block(nn.Module):
    """Attention, then a feed-forward, both on the residual stream.

    A block does not know its index or name in the model, so `torch.compile` makes one program for
    all blocks.

    Args:
        attention: The first branch.
        feed_forward: The second branch.
        hidden_size: D.
        layer_norm_epsilon: Added to the variance.
        bias: Whether the LayerNorms have one.
        drop_path: Probability that a sample does without a branch (stochastic depth); None: no
            block of the model has any.
    """

    def __init__(
        self,
        attention: SelfAttention,
        feed_forward: FeedForward,
        *,
        hidden_size: int,
        layer_norm_epsilon: float,
        bias: bool,
        drop_path: float | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(hidden_size, eps=layer_norm_epsilon, bias=bias)
        self.attention = attention
        self.feed_forward_norm = LayerNorm(hidden_size, eps=layer_norm_epsilon, bias=bias)
        self.feed_forward = feed_forward
        self.drop_path = DropPath(drop_path)

    def initializers(self) -> dict[str, Initializer]:
        """Says how each LayerNorm starts; the branches have initializers of their own."""
        return {
            **norm_initializers("attention_norm", self.attention_norm),
            **norm_initializers("feed_forward_norm", self.feed_forward_norm),
        }

    def forward(
        self, x_BTD: Tensor, given: BlockInput = NOTHING_ELSE
    ) -> tuple[Tensor, RoutingStats | None]:
        """Runs both branches.

        Args:
            x_BTD: The residual stream.
            given: What else there is.

        Returns:
            The residual stream [B, T, D] after the block, and the routing statistics.
        """
        attended_BTD, trace = self.attention(
            self.attention_norm(x_BTD),
            traced_head=self.feed_forward.attention_head(),
            cache=None if given.cache is None else given.cache.attention,
            mask_BT=given.mask_BT,
        )
        x_BTD = x_BTD + self.drop_path(attended_BTD)
        y_BTD, stats = self.feed_forward(
            self.feed_forward_norm(x_BTD), x_BTD, given._replace(attention=trace)
        )
        return x_BTD + self.drop_path(y_BTD), stats


class PostNormBlock(Block):
    """A block that normalizes the sum of each branch and its input, as BERT's do."""

    def forward(
        self, x_BTD: Tensor, given: BlockInput = NOTHING_ELSE
    ) -> tuple[Tensor, RoutingStats | None]:
        """Runs both branches; see `Block.forward`. It takes no cache."""
        assert given.cache is None
        attended_BTD, trace = self.attention(
            x_BTD, traced_head=self.feed_forward.attention_head(), mask_BT=given.mask_BT
        )
        x_BTD = self.attention_norm(x_BTD + self.drop_path(attended_BTD))
        y_BTD, stats = self.feed_forward(x_BTD, x_BTD, given._replace(attention=trace))
        return self.feed_forward_norm(x_BTD + self.drop_path(y_BTD)), stats


def run_block(block: nn.Module, x_BTD: Tensor, recompute: Recompute, *others: Any) -> Any:
    """Runs a block, and keeps its input alone if the rest is computed again.

    Args:
        block: The block.
        x_BTD: The residual stream.
        recompute: The model's key.
        others: What else the block takes.

    Returns:
        What the block does.
    """
    if recompute == "block" and torch.is_grad_enabled():
        # The state of the random generators is kept, so the second pass drops the same units.
        return checkpoint(block, x_BTD, *others, use_reentrant=False, preserve_rng_state=True)
    return block(x_BTD, *others)
