"""A classifier's output layer as a mixture of factorized experts.

    a = gate(z)        y = layer(z, a)

Source: Oldfield et al. 2024, sections 4.1 and 4.2: CLIP and DINO with a muMoE as the output layer.

Shapes: B images, D width, K classes.
"""

from typing import Literal

from torch import Tensor

from polyad.model.mumoe.config import (
    FactorizedExperts,
)
from polyad.model.mumoe.gating import Gate
from polyad.model.mumoe.layer import gate_statistics
from polyad.model.output import RoutingStats, StatisticsModule


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
        if self.rank != "match-dense":
            return self
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
        self.gate = Gate(config.num_experts, width, config.gate, config.gate_norm)
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

    def gate_columns(self) -> list[Tensor]:
        """Returns the gate's columns for each level, [N, D]."""
        return list(self.gate.weight.split_with_sizes(list(self.config.num_experts)))

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            stats: Statistics of the head, averaged over the step.
            progress: Fraction of the run's steps that are done.
        """
        self.gate.update(stats.measures)
