"""Vision transformers with a feed-forward of any kind in their blocks; V-MoE if it is sparse.

Sources: Dosovitskiy et al. 2021, "An image is worth 16x16 words"; Riquelme et al. 2021, "Scaling
vision with sparse mixture of experts" (V-MoE).

Shapes: B images, C channels, H x W pixels, T tokens (patches, after a class token if there is one),
D width, K classes, L blocks.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyad.model.attention import SelfAttention
from polyad.model.block import Block, FeedForwardConfig, build_feedforward, run_blocks
from polyad.model.initialization import ZEROS, Initializer, normal
from polyad.model.layers import Linear
from polyad.model.output import ModelOutput
from polyad.model.settings import TransformerSettings
from polyad.model.vision import Classifier, ImageModelSettings, PatchEmbedding, build_head

POSITION_STD = 0.02
"""Standard deviation of initial position embeddings, as in the authors' code."""


class ViTConfig(TransformerSettings, ImageModelSettings):
    """Vision transformer; the defaults are those of ViT-B/16."""

    kind: Literal["vit"] = "vit"
    """The kind of model."""
    pool: Literal["class_token", "mean"] = "class_token"
    """Input of the head: `class_token`, an additional token that attends to the patches, or `mean`,
    the mean over the patches."""
    pre_norm: bool = False
    """Whether there is a LayerNorm before the first block, as in CLIP."""
    pre_logits: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Width, in units, of an additional layer with tanh before the head; null: no such layer."""

    def head_width(self) -> int:
        """Returns the width of the head's input."""
        return self.pre_logits or self.hidden_size

    def in_words(self) -> str:
        """Describes depth, width and patches for the user."""
        return (
            f"ViT, {self.num_layers} blocks, width {self.hidden_size}, {self.num_patches} patches"
        )


class ViT(Classifier):
    """A vision transformer; see `Decoder` for how a model is built and filled.

    Args:
        config: Its configuration, with the number of classes filled in.

    Raises:
        ValueError: The number of classes is None.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patch_embedding = PatchEmbedding(config)
        self.class_token = (
            nn.Parameter(torch.empty(1, width)) if config.pool == "class_token" else None
        )
        tokens = config.num_patches + (config.pool == "class_token")
        self.position_embedding = nn.Parameter(torch.empty(tokens, width))
        self.dropout = nn.Dropout(config.dropout)
        self.pre_norm = config.build_norm() if config.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            _build_block(config, feed_forward, number)
            for number, feed_forward in enumerate(config.block_feed_forwards())
        )
        self.final_norm = config.build_norm()
        self.pre_logits: Linear | None = None
        if config.pre_logits is not None:
            start = normal(config.weight_std(width, config.pre_logits))
            self.pre_logits = Linear(width, config.pre_logits, start)
        self.head = build_head(config)

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers of parameters outside the blocks; see
        `model/initialization.py`."""
        return {"class_token": ZEROS, "position_embedding": normal(POSITION_STD)}

    def forward(self, images_BCHW: Tensor) -> ModelOutput:
        """Classifies images.

        Args:
            images_BCHW: Normalized images.

        Returns:
            Logits [B, K] and one `RoutingStats` per block whose feed-forward routes.
        """
        x_BTD = self.embed(images_BCHW)
        x_BTD, routing = run_blocks(self.blocks, x_BTD, self.config.recompute)
        logits_BK, of_head = self.score(x_BTD)
        return ModelOutput(logits_BK, (*routing, *of_head))

    def embed(self, images_BCHW: Tensor) -> Tensor:
        """Returns the input of the first block [B, T, D]."""
        x_BTD: Tensor = self.patch_embedding(images_BCHW)
        if self.class_token is not None:
            first_B1D = self.class_token.expand(len(x_BTD), -1, -1)
            x_BTD = torch.cat([first_B1D, x_BTD], dim=1)
        embedded_BTD: Tensor = self.pre_norm(self.dropout(x_BTD + self.position_embedding))
        return embedded_BTD

    def pool(self, x_BTD: Tensor) -> Tensor:
        """Computes the input of the head [B, D] from the last block's output."""
        if self.class_token is not None:
            pooled_BD: Tensor = self.final_norm(x_BTD[:, 0])
        else:
            pooled_BD = self.final_norm(x_BTD).mean(1)
        if self.pre_logits is not None:
            pooled_BD = torch.tanh(self.pre_logits(pooled_BD))
        return pooled_BD


def _build_block(config: ViTConfig, feed_forward: FeedForwardConfig, number: int) -> Block:
    width = config.hidden_size
    std = config.weight_std(width, feed_forward.inner_size(width))
    return Block(
        SelfAttention(config.context(config.weight_std(width, width))),
        build_feedforward(feed_forward, config.context(std)),
        build_norm=config.build_norm,
        drop_path=config.drop_path_of(number),
    )
