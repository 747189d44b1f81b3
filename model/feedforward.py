"""The interface of feed-forwards to their block, their configuration, and the dense kind.

Shapes: B batch, T tokens in a sequence, D width, F inner width, A heads, H width of one head, N
experts.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Self, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from polyad.model.attention import AttentionTrace, BlockCache
from polyad.model.config import Config
from polyad.model.initialization import normal
from polyad.model.layers import Linear, RealTokens
from polyad.model.output import RoutingStats
from polyad.model.rotary import Rotation

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "quick_gelu", "relu"]
"""GELU, exact or approximated by tanh; x sigmoid(1.702 x); or ReLU."""
GatedActivation: TypeAlias = Literal["swiglu", "geglu", "clamped_swiglu"]
"""Activations of two layers, the gate and the up projection; see `GATED`."""


@dataclass(frozen=True, kw_only=True)
class FeedForwardContext:
    """Settings of the model that every kind of feed-forward receives."""

    hidden_size: int
    """Width D of the input and the output."""
    bias: bool
    """Whether linear layers have a bias."""
    dropout: float
    """Dropout probability of the output."""
    initializer_std: float
    """Standard deviation of initial weights, except those before the residual stream."""
    residual_std: float
    """Standard deviation of initial weights whose output is added to the residual stream."""
    num_heads: int | None = None
    """Number of attention heads in the same block; None in a model without attention."""
    activation: Activation | GatedActivation = "gelu_tanh"
    """The activation of the dense feed-forward."""
    causal: bool = True
    """Whether a token must not depend on later tokens, as in a causal language model."""


class BlockInput(NamedTuple):
    """What a block, its feed-forward and their router may read besides the residual stream.

    A NamedTuple, because DeepSpeed's hooks only look for tensors in tuples.
    """

    mask_BT: Tensor | None = None
    """True for tokens, False for padding, for bidirectional attention; None if there is no padding,
    or if attention is causal and padding comes last."""
    real: RealTokens | None = None
    """The tokens that are not padding, for routing; None for all, or if no block routes."""
    cache: BlockCache | None = None
    """In generation, this block's cache of earlier tokens, to which these are added."""
    attention: AttentionTrace | None = None
    """The trace of the block's attention, for a feed-forward whose `attention_head` is not None;
    set by the block."""
    rotation: Rotation | None = None
    """The rotation of the tokens' positions, for attention; None if positions are learned."""
    document_start_BT: Tensor | None = None
    """The position of the first token of each token's document, in training, if a feed-forward
    `reads_documents`; None if each sequence is one document, or if they are not needed."""


NOTHING_ELSE = BlockInput()
"""No padding, no cache, no trace."""


def refuse_autocast(x: Tensor, what: str) -> None:
    """Raises an error if `torch.autocast` would change the precision of only some products.

    Args:
        x: The input of the computation.
        what: Name of the layer in the error message.

    Raises:
        RuntimeError: Autocast is on for the tensor's device.
    """
    kind = x.device.type
    # Not `torch.amp.is_autocast_available`, which breaks the graph in older compilers.
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        raise RuntimeError(
            f"{what} does not work under torch.autocast, which would mix precisions within its "
            f"products: give the model bf16 weights instead, as train.precision: bf16 does"
        )


class FeedForward(nn.Module, ABC):
    """The base class of all feed-forwards."""

    def attention_head(self) -> Tensor | None:
        """Returns the head of the block's attention whose trace `forward` needs.

        The block calls it before attention runs. The result changes only in `update`.

        Returns:
            [1], its index among the heads of this rank; None if `forward` needs no trace.
        """
        return None

    @abstractmethod
    def forward(
        self,
        normalized_BTD: Tensor,
        residual_BTD: Tensor,
        given: BlockInput = NOTHING_ELSE,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Computes the block's second branch.

        Args:
            normalized_BTD: The residual stream after the block's norm.
            residual_BTD: The residual stream before it, which the gate of a muMoE reads.
            given: Further inputs. Padding is not routed, and its output is undefined.

        Returns:
            The output [B, T, D], before the residual addition, and the routing statistics with an
            empty name, or None from a feed-forward that does not route.
        """

    def gate_columns(self) -> list[Tensor]:
        """Returns the directions of the gate's input that raise each expert's score.

        Returns:
            For each level of experts [N, D], N experts; empty if the layer does not route.
        """
        return []

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Prepares the next optimizer step; called once after each step, if the layer routes.

        Args:
            stats: This layer's statistics, averaged over the step.
            progress: Fraction of the run's steps that are done.
        """


class FeedForwardSettings(Config, ABC):
    """The base class of feed-forward configurations, each of which defines only what differs."""

    kind: str
    """The kind of feed-forward."""

    def inner_size(self, width: int) -> int:
        """Returns the inner width F in a model of width D: by default the key hidden_size, or four
        times D if that is null."""
        inner: int | None = getattr(self, "hidden_size", None)
        return inner or 4 * width

    @abstractmethod
    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """Returns the sizes that tensor parallelism splits, by key: one of each entry must be
        divisible.

        Args:
            width: D.
        """

    def of_model(self, *, width: int, bias: bool) -> Self:
        """Returns a copy with derived values from the model filled in; by default unchanged.

        Args:
            width: D.
            bias: Whether linear layers have a bias.

        Raises:
            SectionError: The section does not fit the model.
        """
        return self

    def reads_documents(self) -> bool:
        """Returns whether training depends on where documents begin and end."""
        return False

    def of_block(self, block: int) -> "Self | DenseFeedForwardConfig":
        """Returns the feed-forward of one block; by default the same in each.

        Args:
            block: Number of the block, from 0.
        """
        return self

    def check_model(self, *, num_layers: int, num_heads: int | None, causal: bool) -> None:
        """Checks this section against the rest of the model; by default always valid.

        Args:
            num_layers: Number of blocks of the model.
            num_heads: Number of attention heads; None without attention.
            causal: Whether it is a causal language model.

        Raises:
            SectionError: The section does not fit the model.
        """


class DenseFeedForwardConfig(FeedForwardSettings):
    """A dense feed-forward: every token passes through the same two layers (three with a gate)."""

    kind: Literal["dense"] = "dense"
    """The kind of feed-forward."""

    hidden_size: Annotated[int, Field(ge=1)] | None = None
    """Inner width F, in units; null: four times the model's width."""
    weight_scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor of the initial weights of both layers; 1 leaves them as the model initializes them."""

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """See `FeedForwardSettings.cut_sizes`: the inner width."""
        return [{"hidden_size": self.inner_size(width)}]

    def parameters(self, width: int, bias: bool, gated: bool = False) -> int:
        """Counts the parameters of its layers.

        Args:
            width: D.
            bias: Whether they have a bias.
            gated: Whether there is a gate.
        """
        inner = self.inner_size(width)
        return (2 + gated) * width * inner + bias * ((1 + gated) * inner + width)


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), as in CLIP."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": relu,
}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up (Shazeer 2020, "GLU variants improve transformer")."""
    return silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) up, with GELU approximated by tanh (Shazeer 2020)."""
    return gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate) with clamped inputs, as in gpt-oss.

    Args:
        gate: Clamped from above only.
        up: Clamped on both sides.
        alpha: Steepness of the sigmoid.
        limit: The bound.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


GATED: dict[str, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "clamped_swiglu": clamped_swiglu,
}
"""Activations of two layers, the gate and the up projection."""


class DenseFeedForward(FeedForward):
    """Up projection, activation (tanh-approximated GELU in GPT-2), down projection; optionally
    gated.

    Args:
        config: Its own configuration.
        context: Settings of the model.
    """

    def __init__(self, config: DenseFeedForwardConfig, context: FeedForwardContext) -> None:
        super().__init__()
        inner_size = config.inner_size(context.hidden_size)
        start = normal(config.weight_scale * context.initializer_std)
        end = normal(config.weight_scale * context.residual_std)
        self.activation = (ACTIVATIONS | GATED)[context.activation]
        self.gate: Linear | None = None
        if context.activation in GATED:
            self.gate = Linear(context.hidden_size, inner_size, start, bias=context.bias)
        self.up = Linear(context.hidden_size, inner_size, start, bias=context.bias)
        self.down = Linear(inner_size, context.hidden_size, end, bias=context.bias)
        self.dropout = nn.Dropout(context.dropout)

    def forward(
        self,
        normalized_BTD: Tensor,
        residual_BTD: Tensor,
        given: BlockInput = NOTHING_ELSE,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Applies the layers to the normalized input; see `FeedForward.forward`."""
        inner_BTF = self.up(normalized_BTD)
        if self.gate is None:
            inner_BTF = self.activation(inner_BTF)
        else:
            inner_BTF = self.activation(self.gate(normalized_BTD), inner_BTF)
        return self.dropout(self.down(inner_BTF)), None
