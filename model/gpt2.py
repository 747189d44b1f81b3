"""GPT-2, with a feed-forward of any kind in its blocks.

Source: Radford et al. 2019, "Language models are unsupervised multitask learners", and the released
code.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary, K classes, L blocks.
"""

from typing import Annotated, Literal

from pydantic import Field

from polyad.model.block import Block, FeedForwardConfig, build_block
from polyad.model.decoder import DecoderSettings, ReplacedConfig
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.heads import ClassificationHeadConfig
from polyad.model.layers import LayerNorm
from polyad.model.settings import Count


class GPT2Config(DecoderSettings):
    """GPT-2; the defaults are those of the 124M model."""

    kind: Literal["gpt2"] = "gpt2"
    """The kind of model."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 12
    """Number of transformer blocks L."""
    hidden_size: Count = 768
    """Width D of the residual stream, in units; a multiple of num_heads."""
    num_heads: Count = 12
    """Number of attention heads."""
    sequence_length: Count = 1024
    """Maximum input length in tokens, which is also the number of learned positions."""
    vocab_size: Count | None = None
    """Vocabulary size V, in tokens; null: that of the data's tokenizer."""
    end_of_text_id: Annotated[int, Field(ge=0)] | None = None
    """ID of the token that ends each document, for feed-forwards whose training depends on document
    boundaries (model.feed_forward.pool); null: that of the data's tokenizer, where it is needed."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability for the embeddings, the attention weights and the output of every
    residual branch."""
    bias: bool = True
    """Whether linear layers and LayerNorms have a bias."""
    layer_norm_epsilon: Annotated[float, Field(gt=0, le=1e6)] = 1e-5
    """Epsilon that is added to the variance in every LayerNorm."""
    initializer_range: Annotated[float, Field(gt=0, le=1e6)] = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 L) for the last layer of each
    residual branch, with L blocks."""
    tied_embeddings: bool = True
    """Whether the output head shares its matrix with the token embedding; false: it has a matrix of
    its own, of the same size."""
    feed_forward: FeedForwardConfig = DenseFeedForwardConfig()
    """The feed-forward layer of every block."""
    replaced: ReplacedConfig | None = None
    """Blocks that have another feed-forward instead of this one, as trained by `distill.blocks`;
    null: none."""
    head: ClassificationHeadConfig | None = None
    """A classification head for whole sequences; null: the model predicts the next token."""

    def has_bias(self) -> bool:
        """See `TransformerSettings.has_bias`."""
        return self.bias

    def in_words(self) -> str:
        """Describes depth and width for the user."""
        return f"GPT-2, {self.num_layers} blocks, width {self.hidden_size}"

    def build_norm(self) -> LayerNorm:
        """See `DecoderSettings.build_norm`."""
        return LayerNorm(self.hidden_size, eps=self.layer_norm_epsilon, bias=self.bias)

    def build_block(self, feed_forward: FeedForwardConfig, number: int) -> Block:
        """See `DecoderSettings.build_block`."""
        context = self.context(self.initializer_range, self.residual_std())
        return build_block(feed_forward, context, layer_norm_epsilon=self.layer_norm_epsilon)
