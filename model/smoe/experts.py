"""Experts: MLPs with stacked weights, applied to rows sorted by expert; and sparse upcycling.

Upcycling makes each expert a copy of a trained dense feed-forward:

    up_e = up + noise * std(up) * n_e        n_e standard normal, separate for each expert e

down and the gate are treated in the same way. With K > 1 and `combine: auto`, weights sum to 1, so
the output equals that of the dense feed-forward whichever experts are selected. With K = 1, or
`combine: scores`, weights are scores and do not sum to 1. Source: Komatsuzaki et al. 2023, "Sparse
upcycling: training mixture-of-experts from dense checkpoints".

Shapes: M rows, E experts, D width, F inner width.
"""

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

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
from polyad.model.initialization import ZEROS, Initializer, normal, seeded_generator
from polyad.model.kernels.grouped import ExpertWeights, grouped, inner_units
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig


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
        self.activation: Callable[..., Tensor] | None = None
        """Of the first layer, or of the gate's and the first layer's output; None for the kernels'
        built-in GELU approximated by tanh."""
        if activation != "gelu_tanh":
            self.activation = (ACTIVATIONS | GATED)[activation]

    @abstractmethod
    def stacked(self) -> ExpertWeights:
        """Returns the weights of all experts."""

    def forward(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Runs every row through its expert.

        Args:
            rows_MD: All rows of expert 0, then all of expert 1, and so on.
            counts_E: Number of rows of each expert; may be 0. There may be further rows.

        Returns:
            [M, D], in the same order; rows after the last expert hold arbitrary values.
        """
        drop = self.dropout if self.training and self.dropout.p else None
        return grouped(rows_MD, self.stacked(), counts_E, self.activation, drop)

    @torch.no_grad()
    def inner(self, rows_MD: Tensor, expert: int) -> Tensor:
        """Computes the inner units of one expert after its activation.

        Args:
            rows_MD: The input rows.
            expert: The index of the expert.

        Returns:
            [M, F], without gradient.
        """
        counts_E = torch.zeros(self.config.num_experts, dtype=torch.int64, device=rows_MD.device)
        counts_E[expert] = len(rows_MD)
        return inner_units(rows_MD, self.stacked(), counts_E, self.activation)


class Experts(StackedExperts):
    """E experts: up, an activation (tanh-approximated GELU by default), dropout, down; a gated
    activation adds a gate layer. An engine may hold both as one parameter, so that one product
    reads the rows: `up` is then [E, D, 2, F], of the gate and of up, and `gate` is None.

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
        if config.activation in GATED:
            self.gate = nn.Parameter(torch.empty_like(self.up))
            self.gate_bias = nn.Parameter(torch.empty(experts, inner)) if context.bias else None
        if config.activation == "clamped_swiglu":
            self.activation = functools.partial(
                clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit
            )
        self.up_lora: Any = None
        """LoRA's adapters of each layer; see `model/lora.py`."""
        self.down_lora: Any = None
        self.gate_lora: Any = None

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of each parameter, per expert; see `model/initialization.py`."""
        first = self.context.initializer_std
        second = self.context.residual_std if self.config.scale_residual_init else first
        return {
            "up": normal(first).each_expert(),
            "down": normal(second).each_expert(),
            "gate": normal(first).each_expert(),
            "up_bias": ZEROS.each_expert(),
            "gate_bias": ZEROS.each_expert(),
        }

    def stacked(self) -> ExpertWeights:
        """See `StackedExperts.stacked`."""
        if self.up.dim() == 4:
            biases = tuple(x for x in (self.gate_bias, self.up_bias) if x is not None)
            bias_EH = torch.cat(biases, 1) if biases else None
            return ExpertWeights(self.up.flatten(2), bias_EH, self.down)
        adapters = (self.up_lora, self.down_lora, self.gate_lora)
        low_rank = (each.matrices() for each in adapters if each is not None)
        return ExpertWeights(
            self.up, self.up_bias, self.down, self.gate, self.gate_bias, tuple(chain(*low_rank))
        )


_COPIED = {
    "experts.up": "up.weight", "experts.up_bias": "up.bias",
    "experts.gate": "gate.weight", "experts.gate_bias": "gate.bias",
    "experts.down": "down.weight", "output_bias": "down.bias",
}  # fmt: skip


def dense_tensor(name: str) -> str | None:
    """Finds the dense parameter from which a parameter of a sparse layer is copied.

    Args:
        name: The parameter's name in the sparse model, as in `named_parameters`.

    Returns:
        The name of the dense parameter; None if it is not copied: a router's, or outside of sparse
        layers. Experts store a weight transposed, and may get noise in it.
    """
    parts = re.fullmatch(r"(blocks\.\d+\.\w*feed_forward)\.(.+)", name)
    return f"{parts[1]}.{_COPIED[parts[2]]}" if parts and parts[2] in _COPIED else None


def copies(value: Tensor, num_experts: int, noise: float, seed: int, name: str) -> Tensor:
    """Stacks copies of a parameter, each with its own noise.

    Args:
        value: The parameter of one expert, in its orientation.
        num_experts: E.
        noise: Standard deviation of the noise, relative to that of the values; with 0 nothing is
            drawn.
        seed: The seed of the noise.
        name: Name of the stacked parameter, on which the noise depends too.

    Returns:
        [E, ...], fp32. At most one expert's noise is in memory besides it.
    """
    stacked = torch.empty((num_experts, *value.shape), dtype=torch.float32)
    stacked.copy_(value)
    if noise:
        scale = noise * value.std(correction=0)
        for expert in range(num_experts):
            generator = seeded_generator(seed, f"{name}/noise", expert)
            stacked[expert] += scale * torch.randn(value.shape, generator=generator)
    return stacked
