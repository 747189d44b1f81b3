"""A classifier's output layer as a mixture of factorized experts.

    a = gate(z)        y = layer(z, a)

Source: Oldfield et al. 2024, sections 4.1 and 4.2: CLIP and DINO with a muMoE as the output layer.

Shapes: B images, D width, K classes.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from polyad.model.config import SectionError
from polyad.model.initialization import Initializer
from polyad.model.mumoe.config import (
    FACTORIZATIONS,
    Count,
    FactorizationName,
    FactorizedExperts,
    nearest_rank,
)
from polyad.model.mumoe.factorizations import Factorized, Sizes
from polyad.model.mumoe.gating import Gate
from polyad.model.mumoe.layer import gate_statistics
from polyad.model.output import RoutingStats, StatisticsModule


class MuMoEHeadConfig(FactorizedExperts):
    """A muMoE head: a gate and one factorized layer."""

    kind: Literal["mumoe"] = "mumoe"
    """The kind of head."""
    factorization: FactorizationName = "cp"
    """Factorization of the tensor of all experts' weights: `cp`, `tr` (tensor ring), `tt` (tensor
    train) or `tucker`."""
    rank: int | Literal["match-dense"] = "match-dense"
    """Rank R of the input and output factors; `match-dense`: the rank at which the head has the
    parameter count closest to a linear one."""
    expert_rank: Count = 4
    """Rank of the expert modes: R1 = R2 of a tensor ring, R2 of a tensor train, the rank of each
    expert mode of Tucker; not used by CP."""
    gate: Literal["entmax15", "softmax"] = "entmax15"
    """How normalized scores become coefficients of the experts."""
    gate_norm: Literal["layer", "batch"] = "layer"
    """How scores are normalized: `layer`, over the experts of an image, or `batch`, over the images
    of a batch."""
    level_std: float = Field(default=0.0, ge=0, le=1e6)
    """Standard deviation of the initial expert factors of all levels after the first, around one or
    the identity."""

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
        linear = (width + 1) * classes

        def parameters(rank: int) -> int:
            return self.model_copy(update={"rank": rank}).parameters(width, classes)

        if parameters(1) > linear:
            raise SectionError(
                f"@rank: match-dense is not allowed with @num_experts: {list(self.num_experts)}: "
                f"even at rank 1 the head has {parameters(1):,} parameters, but a linear one only "
                f"{linear:,}; use fewer experts, or give a number"
            )
        return self.model_copy(update={"rank": nearest_rank(parameters, linear)})

    def parameters(self, width: int, classes: int) -> int:
        """Counts the parameters of the head, including the gate."""
        layer = self.factorized.num_parameters(self.sizes(width, classes))
        return sum(self.num_experts) * width + layer

    def sizes(self, width: int, classes: int) -> Sizes:
        """Returns the sizes of the layer, once the rank is a number."""
        assert isinstance(self.rank, int), "of_model() fills the rank in"
        return Sizes(
            num_experts=self.num_experts,
            inputs=width,
            outputs=classes,
            rank=self.rank,
            expert_rank=self.expert_rank,
            bias=True,
            level_std=self.level_std,
        )

    @property
    def factorized(self) -> type[Factorized]:
        """The class of the layer."""
        return FACTORIZATIONS[self.factorization]


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

    def initializers(self) -> dict[str, Initializer]:
        """Empty: it has no parameters of its own, and its parts have their own initializers."""
        return {}

    def forward(self, z_BD: Tensor) -> tuple[Tensor, RoutingStats]:
        """Classifies images.

        Args:
            z_BD: The representation of each image.

        Returns:
            Logits [B, K], and the statistics with the name `head`.
        """
        output = self.gate(z_BD)
        logits_BK: Tensor = self.layer(z_BD, self.gate.mixing_weights(output, z_BD.dtype))
        stats = gate_statistics(output, measures=self.measures).but(name="head")
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
        self.gate.update(stats.score_mean_S, stats.score_square_S)
