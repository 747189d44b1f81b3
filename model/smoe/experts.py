"""Experts: MLPs with stacked weights, applied to rows sorted by expert.

Shapes: M rows, E experts, D width, F inner width.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.feedforward import (
    ACTIVATIONS,
    GATED,
    Activation,
    FeedForwardContext,
    GatedActivation,
    clamped_swiglu,
)
from polyad.model.initialization import ZEROS, Initializer, normal
from polyad.model.kernels.grouped import Gate, gelu_by_tanh, grouped, one_by_one
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig


class ExpertWeights(NamedTuple):
    """The stacked weights of some experts of a layer."""

    up: Tensor
    """[E, D, F]."""
    up_bias: Tensor | None
    """[E, F]."""
    down: Tensor
    """[E, F, D]."""
    low_rank: tuple[Tensor, ...] = ()
    """LoRA's adapters of the experts: A and B of up, down, and a gate; see `model/lora.py`."""
    gate: Tensor | None = None
    """[E, D, F]; None if the activation has no gate."""
    gate_bias: Tensor | None = None
    """[E, F]."""


def activation_of_experts(
    name: Activation | GatedActivation,
) -> Callable[[Tensor], Tensor] | None:
    """Returns the activation to pass to the kernels of experts; None for the built-in one, or for
    one with a gate.

    Args:
        name: The name in the configuration.
    """
    return None if name == "gelu_tanh" or name in GATED else ACTIVATIONS[name]()


class StackedExperts(nn.Module, ABC):
    """The base class of experts: two layers with stacked weights, an activation and dropout.

    The second bias is not included: `SelectingMoE.output_bias` is added to the sum over experts,
    which does not need a pass over all rows.

    Args:
        config: The layer's configuration.
        context: Settings of the model.
        activation: The activation of the inner units.
        dropout: Dropout probability of the inner units and of each expert's output.
    """

    inner_axes: ClassVar[dict[str, int]]
    """The axis of inner units of each parameter, by name."""
    num_units: int
    """Number of inner units of one expert, over all ranks."""

    def __init__(
        self,
        config: SelectingConfig,
        context: FeedForwardContext,
        *,
        activation: Activation | GatedActivation,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.dropout = nn.Dropout(dropout)
        self.activation = activation_of_experts(activation)
        self.combine: Callable[..., Tensor] | None = GATED.get(activation)

    @abstractmethod
    def stacked(self) -> ExpertWeights:
        """Returns the weights of all experts."""

    def split(self, sizes: list[int]) -> list[ExpertWeights]:
        """Splits the experts into groups that can be run one after the other.

        Args:
            sizes: Number of experts of each group.
        """
        whole = self.stacked()
        if len(sizes) == 1:
            return [whole]

        def parts(x: Tensor | None) -> Iterable[Tensor | None]:
            return [None] * len(sizes) if x is None else torch.split(x, sizes)

        optional = zip(parts(whole.up_bias), parts(whole.gate), parts(whole.gate_bias), strict=True)
        layers = zip(torch.split(whole.up, sizes), torch.split(whole.down, sizes), strict=True)
        return [
            ExpertWeights(up, up_bias, down, gate=gate, gate_bias=gate_bias)
            for (up, down), (up_bias, gate, gate_bias) in zip(layers, optional, strict=True)
        ]

    def forward(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Runs every row through its expert.

        Args:
            rows_MD: All rows of expert 0, then all of expert 1, and so on.
            counts_E: Number of rows of each expert; may be 0. There may be further rows.

        Returns:
            [M, D], in the same order; rows after the last expert hold arbitrary values.
        """
        compute = one_by_one if self.config.experts == "loop" else grouped
        drop = self.dropout if self.training and self.dropout.p else None
        weights = self.stacked()
        gate = None
        if weights.gate is not None:
            assert self.combine is not None
            gate = Gate(weights.gate, weights.gate_bias, self.combine)
        return compute(
            rows_MD,
            weights.up,
            weights.up_bias,
            weights.down,
            counts_E,
            drop,
            self.activation,
            gate,
        )

    @torch.no_grad()
    def inner(self, rows_MD: Tensor, expert: int) -> Tensor:
        """Computes the inner units of one expert after its activation.

        Args:
            rows_MD: The input rows.
            expert: The index of the expert.

        Returns:
            [M, F], without gradient.
        """
        weights = self.split([1] * self.config.num_experts)[expert]
        of_up, of_gate = weights.low_rank[:2], weights.low_rank[4:]
        inner_MF = _first_layer(rows_MD, weights.up, weights.up_bias, of_up)
        if weights.gate is None:
            return (self.activation or gelu_by_tanh)(inner_MF)
        assert self.combine is not None
        gate_MF = _first_layer(rows_MD, weights.gate, weights.gate_bias, of_gate)
        return self.combine(gate_MF, inner_MF)


def _first_layer(
    rows_MD: Tensor, weight_1DF: Tensor, bias_1F: Tensor | None, low_rank: tuple[Tensor, ...]
) -> Tensor:
    """Applies a layer of one expert, including LoRA's adapter."""
    output_MF = rows_MD @ weight_1DF[0]
    if bias_1F is not None:
        output_MF = output_MF + bias_1F[0]
    if low_rank:
        output_MF = output_MF + rows_MD @ low_rank[0][0] @ low_rank[1][0]
    return output_MF


class Experts(StackedExperts):
    """E experts: up, an activation (tanh-approximated GELU by default), dropout, down; a gated
    activation adds a gate layer.

    Args:
        config: The layer's configuration.
        context: Settings of the model.
    """

    config: SparseMoEConfig
    inner_axes: ClassVar[dict[str, int]] = {
        "up": 2,
        "up_bias": 1,
        "down": 1,
        "gate": 2,
        "gate_bias": 1,
    }

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(
            config, context, activation=config.activation, dropout=config.expert_dropout
        )
        experts, width = config.num_experts, context.hidden_size
        inner = self.num_units = config.inner_size(width)
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.up_bias = nn.Parameter(torch.empty(experts, inner)) if context.bias else None
        self.down = nn.Parameter(torch.empty(experts, inner, width))
        self.gate = self.gate_bias = None
        if self.combine is not None:
            self.gate = nn.Parameter(torch.empty_like(self.up))
            self.gate_bias = nn.Parameter(torch.empty(experts, inner)) if context.bias else None
        if config.activation == "clamped_swiglu":
            self.combine = functools.partial(
                clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit
            )

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of each parameter, per expert; see `model/initialization.py`."""
        first = self.context.initializer_std
        second = self.context.residual_std if self.config.scale_residual_init else first
        entries = {
            "up": normal(first).each_expert(),
            "down": normal(second).each_expert(),
            "gate": normal(first).each_expert(),
            "up_bias": ZEROS.each_expert(),
            "gate_bias": ZEROS.each_expert(),
        }
        return {name: each for name, each in entries.items() if getattr(self, name) is not None}

    def stacked(self) -> ExpertWeights:
        """See `StackedExperts.stacked`."""
        return ExpertWeights(
            self.up, self.up_bias, self.down, gate=self.gate, gate_bias=self.gate_bias
        )
