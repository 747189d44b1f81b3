"""The multilinear mixture of experts as a feed-forward of a block.

    a = gate(u)        y = down(GELU(up(z, a)), a)        or down(silu(up_gate(z, a)) up(z, a), a)

and as the output layer of a classifier, with one factorized layer:

    a = gate(z)        y = layer(z, a)

Source: Oldfield et al. 2024, section 4.3: all layers share the coefficients of one gate; sections
4.1 and 4.2: CLIP and DINO with a muMoE as the output layer.

Shapes: B batch or images, T tokens in a sequence, M real tokens, D width, F inner width, N experts
of a level, E and S experts of all levels side by side, L levels, K classes.
"""

import functools
from typing import Literal

import torch
from torch import Tensor, nn

from polyad.model.feedforward import (
    GATED,
    NOTHING_ELSE,
    BlockInput,
    FeedForward,
    FeedForwardContext,
    refuse_autocast,
)
from polyad.model.layers import RealTokens, pack, unpack
from polyad.model.mumoe.config import FactorizedExperts, MuMoEConfig
from polyad.model.mumoe.factorizations import Factorized
from polyad.model.mumoe.gating import Gate, GateOutput
from polyad.model.output import RoutingStats, StatisticsModule, entropy

DOMINANT = 0.5
"""The minimum coefficient with which an expert dominates a token."""


class MuMoE(FeedForward, StatisticsModule):
    """A gate and two factorized layers, or three with a gated activation.

    Args:
        config: Its own configuration.
        context: Settings of the model.
    """

    def __init__(self, config: MuMoEConfig, context: FeedForwardContext) -> None:
        super().__init__()
        width = context.hidden_size
        self.config = config = config.of_model(width=width, bias=context.bias)
        self.gate = Gate(
            config,
            width,
            epsilon=config.gate_norm_epsilon,
            std=config.gate_std,
            dropout=config.expert_dropout,
        )
        sizes = config.layer_sizes(width)
        # GPT-2's scale of weights whose outputs are added to the residual stream.
        scale = context.residual_std / context.initializer_std
        combine = GATED.get(config.activation)
        self.up_gate: Factorized | None = None
        """The gate of the activation, combined with `up`; None without a gated activation."""
        if combine is not None:
            self.up_gate, self.combine = config.factorized(sizes["up_gate"]), combine
        self.up = config.factorized(sizes["up"])
        scale = scale if config.scale_residual_init else 1.0
        self.down = config.factorized(sizes["down"], scale, activated=combine is None)
        self.dropout = nn.Dropout(context.dropout)

    def forward(
        self,
        normalized_BTD: Tensor,
        residual_BTD: Tensor,
        given: BlockInput = NOTHING_ELSE,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Mixes the experts' outputs for the normalized input; see `FeedForward.forward`."""
        refuse_autocast(normalized_BTD, "a muMoE")
        real = given.real
        u_BTD = residual_BTD if self.config.gate_input == "residual" else normalized_BTD
        output = self.gate(pack(u_BTD.flatten(0, 1), real))
        z_MD = pack(normalized_BTD.flatten(0, 1), real)
        coefficients = self.gate.mixing_weights(output, z_MD.dtype)
        inner_MF = self.up(z_MD, coefficients)
        if self.up_gate is not None:
            inner_MF = self.combine(self.up_gate(z_MD, coefficients), inner_MF)
        y_MD = unpack(self.down(inner_MF, coefficients), real)
        stats = gate_statistics(output, real, measures=self.measures)
        stats = self.with_samples(stats, output.coefficients, u_BTD, real)
        return self.dropout(y_MD.view_as(normalized_BTD)), stats

    def layers(self) -> list[Factorized]:
        """Returns the factorized layers; the last is `down`."""
        first = [self.up] if self.up_gate is None else [self.up_gate, self.up]
        return [*first, self.down]

    def gate_columns(self) -> list[Tensor]:
        """Returns the gate's columns for each level, [N, D]: rows of the stored weight."""
        return list(self.gate.weight.split_with_sizes(list(self.config.num_experts)))

    def update(self, stats: RoutingStats, progress: float) -> None:
        """See `FeedForward.update`."""
        self.gate.norm.update(stats.measures)


class MuMoEHeadConfig(FactorizedExperts):
    """A muMoE head: a gate and one factorized layer."""

    kind: Literal["mumoe"] = "mumoe"
    """The kind of head."""

    def of_model(self, width: int, classes: int) -> "MuMoEHeadConfig":
        """Returns a copy with the rank as a number.

        Args:
            width: D.
            classes: K.

        Raises:
            SectionError: No rank is small enough to match a linear head.
        """
        return self.nearest_rank(
            lambda config: config.parameters(width, classes), (width + 1) * classes
        )

    def parameters(self, width: int, classes: int) -> int:
        """Counts the parameters of the head, including the gate."""
        layer = self.factorized.num_parameters(self.sizes(width, classes))
        return sum(self.num_experts) * width + layer


class MuMoEHead(StatisticsModule):
    """A gate and one factorized layer.

    Args:
        config: Its own configuration.
        width: D.
        classes: K.
    """

    def __init__(self, config: MuMoEHeadConfig, width: int, classes: int) -> None:
        super().__init__()
        self.config = config = config.of_model(width, classes)
        self.gate = Gate(config, width)
        self.layer = config.factorized(config.sizes(width, classes))

    def forward(self, z_BD: Tensor) -> tuple[Tensor, RoutingStats]:
        """Classifies images.

        Args:
            z_BD: The representation of each image.

        Returns:
            Logits [B, K], and the statistics with the name `head`.
        """
        output = self.gate(z_BD)
        logits_BK: Tensor = self.layer(z_BD, self.gate.mixing_weights(output, z_BD.dtype))
        stats = gate_statistics(output, measures=self.measures)._replace(name="head")
        return logits_BK, self.with_samples(stats, output.coefficients, z_BD.unsqueeze(1))

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            stats: Statistics of the head, averaged over the step.
            progress: Fraction of the run's steps that are done.
        """
        self.gate.norm.update(stats.measures)


def gate_statistics(
    output: GateOutput, real: RealTokens | None = None, *, measures: bool = True
) -> RoutingStats:
    """Computes the statistics of a gate, without gradients. All are means over tokens, so they can
    be averaged.

    A hierarchy has as many leaves as the product of its level sizes; they are never materialized. A
    leaf's coefficient is a product over levels, so entropies add up, exp(entropy) is a product, and
    the largest coefficient of a token is the product of the largest in each level.

    Args:
        output: The gate's output for the real tokens.
        real: The real tokens; None for all.
        measures: Whether to compute values that only records need.

    Returns:
        The statistics with an empty name. The measures are the mean entropy of the leaves'
        coefficients, the sum of its levels' (`level_entropy_L`); `effective_experts`, the mean of
        its exponential, from 1 to all leaves; `dominated`, the share of the tokens that give one
        leaf at least 0.5; `dominant_E`, the share of the tokens that give this expert as much.
    """
    levels = [a_MN.detach() for a_MN in output.coefficients]
    load_E = torch.cat([a_MN.mean(0) for a_MN in levels])
    stats = RoutingStats(
        name="",
        load_E=load_E,
        levels=tuple(a_MN.shape[-1] for a_MN in levels),
        tokens=None if real is None else real.mask_BT.sum().to(load_E.dtype),
        measures=output.moments,
    )
    if not measures:
        return stats
    entropies = [entropy(a_MN) for a_MN in levels]
    entropy_M = functools.reduce(torch.add, entropies)
    largest_M = functools.reduce(torch.mul, [a_MN.amax(-1) for a_MN in levels])
    values = {
        "entropy": entropy_M.mean(),
        "effective_experts": entropy_M.exp().mean(),
        "dominated": _dominance(largest_M).mean(),
        "dominant_E": torch.cat([_dominance(a_MN).mean(0) for a_MN in levels]),
    }
    if len(levels) > 1:
        values["level_entropy_L"] = torch.stack([level_M.mean() for level_M in entropies])
    return stats._replace(measures=output.moments | values)


def _dominance(a_MN: Tensor) -> Tensor:
    """Returns 1 where a coefficient is at least 0.5, else 0, in the same dtype."""
    # Via bytes: faster on a CPU than from bool. Triton cannot compile a view of a bool's bits.
    return (a_MN >= DOMINANT).to(torch.uint8).to(a_MN.dtype)
