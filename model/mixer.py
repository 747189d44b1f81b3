"""MLP-Mixer, with a feed-forward of any kind for tokens and for channels.

Source: Tolstikhin et al. 2021, "MLP-Mixer: an all-MLP architecture for vision"; with factorized
experts: Oldfield et al. 2024, "Multilinear mixture of experts".

Shapes: B images, C channels, H x W pixels, T patches, D width, K classes, L blocks.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from polyad.model.block import FeedForwardConfig, build_feedforward, run_block
from polyad.model.config import Count
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.layers import DropPath
from polyad.model.output import ModelOutput, RoutingStats
from polyad.model.settings import CutSizes
from polyad.model.vision import Classifier, ImageModelSettings, PatchEmbedding, build_head

TOKENS, CHANNELS = "model.token_feed_forward", "model.channel_feed_forward"


class MixerConfig(ImageModelSettings):
    """MLP-Mixer; the defaults are those of S/16."""

    kind: Literal["mixer"] = "mixer"
    """The kind of model."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 8
    """Number of transformer blocks L."""
    hidden_size: Count = 512
    """Width D of the residual stream, in units."""
    token_feed_forward: FeedForwardConfig = DenseFeedForwardConfig(hidden_size=256)
    """Feed-forward that mixes the patches of each channel; its input width is the number of
    patches."""
    channel_feed_forward: FeedForwardConfig = DenseFeedForwardConfig()
    """Feed-forward that mixes the channels of each patch."""

    @model_validator(mode="after")
    def _feed_forwards_fit(self) -> Self:
        self.check_feed_forwards()
        return self

    def feed_forward_widths(self) -> dict[str, int]:
        """The number of tokens and the number of channels."""
        return {TOKENS: self.num_patches, CHANNELS: self.hidden_size}

    def in_words(self) -> str:
        """Describes depth, width and patches for the user."""
        return (
            f"MLP-Mixer, {self.num_layers} blocks, width {self.hidden_size}, "
            f"{self.num_patches} patches"
        )

    def cut_sizes(self) -> CutSizes:
        """Sizes of both feed-forwards."""
        names = {TOKENS: "(model.image_size / model.patch_size)^2", CHANNELS: "model.hidden_size"}
        widths, sections = self.feed_forward_widths(), self.feed_forwards()
        gated = [key for key in names if sections[key].kind == "mumoe"]  # split along the input
        return [*({names[key]: widths[key]} for key in gated), *self.feed_forward_cut_sizes()]


class MixerBlock(nn.Module):
    """Mixes patches, then channels, both on the residual stream.

    Args:
        config: The model's configuration.
        block: Number of the block, from 0.
    """

    def __init__(self, config: MixerConfig, block: int) -> None:
        super().__init__()
        sections, width = config.feed_forwards(), config.hidden_size
        self.token_norm = config.build_norm()
        self.token_feed_forward = _feed_forward(config, sections[TOKENS], block, config.num_patches)
        self.channel_norm = config.build_norm()
        self.channel_feed_forward = _feed_forward(config, sections[CHANNELS], block, width)
        self.drop_path = DropPath(config.drop_path_of(block))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, RoutingStats | None, RoutingStats | None]:
        """Runs both branches.

        Args:
            x_BTD: The residual stream.

        Returns:
            The residual stream after the block, and the routing statistics of both feed-forwards.
        """
        y_BDT, token_stats = self.token_feed_forward(
            self.token_norm(x_BTD).transpose(1, 2).contiguous(), x_BTD.transpose(1, 2)
        )
        x_BTD = x_BTD + self.drop_path(y_BDT.transpose(1, 2))
        y_BTD, channel_stats = self.channel_feed_forward(self.channel_norm(x_BTD), x_BTD)
        return x_BTD + self.drop_path(y_BTD), token_stats, channel_stats


class Mixer(Classifier):
    """An MLP-Mixer; see `Decoder` for how a model is built and filled.

    Args:
        config: Its configuration, with the number of classes filled in.

    Raises:
        ValueError: The number of classes is None.
    """

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = PatchEmbedding(config)
        self.blocks = nn.ModuleList(MixerBlock(config, n) for n in range(config.num_layers))
        self.final_norm = config.build_norm()
        self.head = build_head(config)

    def forward(self, images_BCHW: Tensor) -> ModelOutput:
        """Classifies images.

        Args:
            images_BCHW: Normalized images.

        Returns:
            Logits [B, K] and the routing statistics of each feed-forward that routes.
        """
        x_BTD, routing = self.embed(images_BCHW), []
        for number, block in enumerate(self.blocks):
            x_BTD, *both = run_block(block, x_BTD, self.config.recompute)
            for name, stats in zip(("token", "channel"), both, strict=True):
                if stats is not None:
                    routing.append(stats._replace(name=f"blocks.{number}.{name}_feed_forward"))
        logits_BK, of_head = self.score(x_BTD)
        return ModelOutput(logits_BK, (*routing, *of_head))

    def embed(self, images_BCHW: Tensor) -> Tensor:
        """Returns the input of the first block [B, T, D]."""
        patches_BTD: Tensor = self.patch_embedding(images_BCHW)
        return patches_BTD

    def pool(self, x_BTD: Tensor) -> Tensor:
        """Computes the input of the head [B, D] from the last block's output."""
        pooled_BD: Tensor = self.final_norm(x_BTD).mean(1)
        return pooled_BD


def _feed_forward(
    config: MixerConfig, feed_forward: FeedForwardConfig, block: int, width: int
) -> nn.Module:
    feed_forward = feed_forward.of_block(block)
    std = config.weight_std(width, feed_forward.inner_size(width))
    return build_feedforward(feed_forward, config.context(std, width=width))
