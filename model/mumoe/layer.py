"""The multilinear mixture of experts as a feed-forward of a block.

    a = gate(u)        y = layer_2(GELU(layer_1(z, a)), a)

Source: Oldfield et al. 2024, section 4.3: one gate, whose coefficients both layers use.

Shapes: B batch, T tokens in a sequence, M tokens that are real, D width, F inner width, N
experts of a level.
"""

from torch import Tensor, nn

from polyad.model.feedforward import (
    NOTHING_ELSE,
    BlockInput,
    FeedForward,
    FeedForwardContext,
    refuse_autocast,
)
from polyad.model.initialization import Initializer
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.mumoe.gating import Gate
from polyad.model.mumoe.statistics import gate_statistics
from polyad.model.output import RoutingStats, StatisticsModule
from polyad.model.padding import pack, unpack


class MuMoE(FeedForward, StatisticsModule):
    """A gate and two factorized layers.

    Args:
        config: Its own configuration.
        context: Settings of the model.
    """

    def __init__(self, config: MuMoEConfig, context: FeedForwardContext) -> None:
        super().__init__()
        width = context.hidden_size
        self.config = config = config.of_model(width=width, bias=context.bias)
        self.gate = Gate(
            config.num_experts,
            width,
            config.gate,
            config.gate_norm,
            epsilon=config.gate_norm_epsilon,
            std=config.gate_std,
            dropout=config.expert_dropout,
            softmax_share=config.softmax_share,
        )
        up, down = config.layer_sizes(width)
        # What GPT-2 scales the weights by whose outputs are added to the residual stream.
        scale = context.residual_std / context.initializer_std
        self.up = config.factorized(up)
        scale = scale if config.scale_residual_init else 1.0
        self.down = config.factorized(down, scale, activated=True)
        self.dropout = nn.Dropout(context.dropout)

    def initializers(self) -> dict[str, Initializer]:
        """None: it has no parameters of its own, and its parts have initializers."""
        return {}

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
        y_MD = unpack(self.down(self.up(z_MD, coefficients), coefficients), real)
        stats = gate_statistics(output, real)
        stats = self.with_samples(stats, output.coefficients, u_BTD, real)
        return self.dropout(y_MD.view_as(normalized_BTD)), stats

    def gate_columns(self) -> list[Tensor]:
        """The gate's columns, of each level [N, D]: rows of the weight as it is stored."""
        return list(self.gate.weight.split_with_sizes(list(self.config.num_experts)))

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            stats: Of this layer, averaged over the step.
            progress: Share of the run's steps that are done.
        """
        self.gate.update(stats.score_mean_S, stats.score_square_S, progress)
