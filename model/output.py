"""What comes out of a model: logits, and what every routed feed-forward did with its tokens.

Both types are NamedTuples, because those pass through the DeepSpeed engine, activation
recomputation and `torch.compile` unchanged. Statistics are returned and never stored on a module: a
stored one counts twice when a block is recomputed.

Shapes: B batch, T tokens in a sequence, V vocabulary, E experts.
"""

from typing import NamedTuple

from torch import Tensor


class RoutingStats(NamedTuple):
    """The statistics of one routed feed-forward over one forward pass."""

    name: str
    """Where the feed-forward stands in the model, as in its parameter names. A feed-forward leaves
    it empty and the model fills it in: see `GPT2.forward`."""
    load_E: Tensor
    """Share of the assignments that each expert received; sums to 1."""
    entropy: Tensor
    """Mean over tokens of the entropy of the routing weights, in nats; no dimensions."""


class ModelOutput(NamedTuple):
    """What `forward` of every model returns."""

    logits: Tensor
    """[B, T, V] in a language model."""
    routing: tuple[RoutingStats, ...]
    """One entry per routed feed-forward, in the order of the blocks; empty in a dense model."""
