"""GPT-2, with a feed-forward of any kind in its blocks.

Source: Radford et al. 2019, "Language models are unsupervised multitask learners", and the released
code.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary, K classes, L blocks.
"""

from typing import Annotated, Literal

from pydantic import Field

from polyad.model.block import Block, FeedForwardConfig, build_block
from polyad.model.decoder import DecoderSettings
from polyad.model.feedforward import DenseFeedForwardConfig, FeedForwardContext
from polyad.model.heads import ClassificationHeadConfig
from polyad.model.layers import LayerNorm
from polyad.model.settings import Count


class GPT2Config(DecoderSettings):
    """The defaults are the 124M model's."""

    kind: Literal["gpt2"] = "gpt2"
    """Which model this is."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 12
    """Number of blocks L."""
    hidden_size: Count = 768
    """Width D of the residual stream, in units; a multiple of num_heads."""
    num_heads: Count = 12
    """Number of attention heads."""
    sequence_length: Count = 1024
    """Longest input, in tokens: there are this many learned positions."""
    vocab_size: Count | None = None
    """Number of tokens V that the model knows; None: that of the data's tokenizer."""
    end_of_text_id: Annotated[int, Field(ge=0)] | None = None
    """The token that ends each document, for feed-forwards whose training depends on documents
    (model.feed_forward.pool); null: that of the data's tokenizer, where it is needed."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability, of the embeddings, the attention weights and the output of every branch."""
    bias: bool = True
    """Whether linear layers and LayerNorms have a bias."""
    layer_norm_epsilon: Annotated[float, Field(gt=0, le=1e6)] = 1e-5
    """Added to the variance in every LayerNorm."""
    initializer_range: Annotated[float, Field(gt=0, le=1e6)] = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 L) where a branch ends."""
    tied_embeddings: bool = True
    """Whether the output head is the token embedding; false: a matrix of its own, as large."""
    feed_forward: FeedForwardConfig = DenseFeedForwardConfig()
    """The feed-forward of every block."""
    head: ClassificationHeadConfig | None = None
    """What is scored of a whole sequence; None: the token after each is."""

    def has_bias(self) -> bool:
        """See `TransformerSettings.has_bias`."""
        return self.bias

    def in_words(self) -> str:
        """The depth and width, for people."""
        return f"GPT-2, {self.num_layers} blocks, width {self.hidden_size}"

    def build_norm(self) -> LayerNorm:
        """See `DecoderSettings.build_norm`."""
        return LayerNorm(self.hidden_size, eps=self.layer_norm_epsilon, bias=self.bias)

    def build_block(self, feed_forward: FeedForwardConfig, number: int) -> Block:
        """See `DecoderSettings.build_block`."""
        context = FeedForwardContext(
            hidden_size=self.hidden_size,
            bias=self.bias,
            dropout=self.dropout,
            initializer_std=self.initializer_range,
            residual_std=self.residual_std(),
            num_heads=self.num_heads,
            causal=True,
        )
        return build_block(feed_forward, context, layer_norm_epsilon=self.layer_norm_epsilon)
