"""The configurations of decoders: GPT-2; and Llama-style decoders and their mixtures of experts.

Source of GPT-2: Radford et al. 2019, "Language models are unsupervised multitask learners", and the
released code.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from torch import nn

from polyad.model.block import Block, FeedForwardConfig, build_block, build_feedforward
from polyad.model.config import Count
from polyad.model.decoder import DecoderParts, DecoderSettings
from polyad.model.feedforward import Activation, DenseFeedForwardConfig, GatedActivation
from polyad.model.layers import NormName, build_norm
from polyad.model.rotary import RotaryConfig
from polyad.model.rotary_attention import GroupedAttention, LatentAttention, LatentConfig
from polyad.model.smoe.config import Placement, SparseMoEConfig, is_placed


class GPT2Config(DecoderSettings):
    """GPT-2; the defaults are those of the 124M model."""

    kind: Literal["gpt2"] = "gpt2"
    """The kind of model."""
    bias: bool = True
    """Whether linear layers and LayerNorms have a bias."""
    layer_norm_epsilon: Annotated[float, Field(gt=0, le=1e6)] = 1e-5
    """Epsilon that is added to the variance in every LayerNorm."""

    def in_words(self) -> str:
        """Describes depth and width for the user."""
        return f"GPT-2, {self.num_layers} blocks, width {self.hidden_size}"

    def build_block(self, feed_forward: FeedForwardConfig, number: int) -> Block:
        """See `DecoderSettings.build_block`."""
        context = self.context(self.initializer_range, self.residual_std())
        return build_block(feed_forward, context, self.build_norm)


Multiplier = Annotated[float, Field(gt=0, le=1e6)]


class DecoderConfig(DecoderSettings):
    """A decoder with rotary positions and RMSNorm, like Llama, Qwen, Mixtral, OLMoE, Granite,
    DeepSeek and gpt-oss; the defaults describe a small Llama."""

    kind: Literal["decoder"] = "decoder"
    """The kind of model."""
    num_key_value_heads: Count | None = None
    """Number of key and value heads, each shared by several query heads (grouped-query attention);
    null: num_heads."""
    head_size: Count | None = None
    """Dimension of each head, in units; null: hidden_size / num_heads."""
    norm: NormName = "rms"
    """Normalization layer: `rms`, RMSNorm without a bias; `rms_rounded_last`, as in gpt-oss, which
    rounds to bf16 after applying the scale rather than before; or `layer`, LayerNorm."""
    norm_epsilon: Annotated[float, Field(gt=0, le=1e6)] = 1e-5
    """Epsilon that is added to the mean square in every norm."""
    rotary: RotaryConfig | None = RotaryConfig()
    """Rotary position embedding; null: sequence_length learned positions instead."""
    attention_bias: bool = False
    """Whether the projections to queries, keys and values have a bias."""
    attention_output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    query_key_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys before rotation: over each `head` separately (Qwen3), over `all`
    heads together (OLMoE), or `none`."""
    query_key_value_clip: Multiplier | None = None
    """Largest absolute value of queries, keys and values, which are clipped to it (OLMo's
    clip_qkv); null: no clipping."""
    attention_scale: Multiplier | None = None
    """Factor of the products of queries and keys; null: 1 / sqrt(head_size)."""
    sliding_window: Count | None = None
    """Number of tokens, including itself, that a token attends to in the blocks listed in
    sliding_window_blocks; null: it attends to all earlier tokens."""
    sliding_window_blocks: Placement = 1
    """Blocks with the sliding window: 1 for all blocks, n for the last of every n blocks, or a list
    of block numbers, from 0."""
    attention_sinks: bool = False
    """Whether each head has an attention sink, a learned logit that takes attention weight away
    from the tokens (gpt-oss)."""
    latent_attention: LatentConfig | None = None
    """Multi-head latent attention (DeepSeek); null: grouped-query attention."""
    mlp_bias: bool = False
    """Whether the linear layers of feed-forwards and routers have a bias."""
    activation: Activation | GatedActivation = "swiglu"
    """Activation of dense feed-forwards: `swiglu` or `geglu` with a gate, or `gelu`, `gelu_tanh`,
    `quick_gelu` or `relu` without one. Sparse experts have their own key,
    model.feed_forward.activation."""
    tied_embeddings: bool = False
    """Whether the output head shares its matrix with the token embedding; false: it has a matrix of
    its own, of the same size."""
    head_bias: bool = False
    """Whether the output head has a bias (Phi-MoE); needs tied_embeddings: false."""
    pad_id: Annotated[int, Field(ge=0)] | None = None
    """ID of the padding token, whose embedding starts at zero and gets no gradient (OLMoE: 1);
    null: none."""
    embedding_multiplier: Multiplier = 1.0
    """Factor of the token embedding (Granite)."""
    residual_multiplier: Multiplier = 1.0
    """Factor of each residual branch before it is added to the residual stream (Granite)."""
    logits_divisor: Multiplier = 1.0
    """Divisor of the output logits (Granite)."""

    @model_validator(mode="after")
    def _attention_fits(self) -> Self:
        heads, groups = self.num_heads, self.known_key_value_heads()
        if heads % groups:
            raise ValueError(
                f"model.num_heads: {heads} is not a multiple of model.num_key_value_heads: {groups}"
            )
        if self.rotary is not None and self._rotated_size() % 2:
            key = "head_size" if self.latent_attention is None else "latent_attention.rotated_size"
            raise ValueError(
                f"model.{key}: {self._rotated_size()} is odd, but units are rotated in pairs"
            )
        if self.latent_attention is not None:
            for key, unused in (
                ("num_key_value_heads", None),
                ("head_size", None),
                ("query_key_norm", "none"),
                ("query_key_value_clip", None),
            ):
                if (value := getattr(self, key)) != unused:
                    raise ValueError(
                        f"model.{key}: {value} is not allowed with model.latent_attention, which "
                        f"has keys of its own; allowed: {('null' if unused is None else unused)}"
                    )
            if self.rotary is None:
                raise ValueError("model.rotary: null is not allowed with model.latent_attention")
        if self.head_bias and self.tied_embeddings:
            raise ValueError("model.head_bias: true needs model.tied_embeddings: false")
        listed = self.sliding_window_blocks if isinstance(self.sliding_window_blocks, list) else []
        if any(block >= self.num_layers for block in listed):
            raise ValueError(
                f"model.sliding_window_blocks: {self.sliding_window_blocks} is not allowed: the "
                f"model has blocks 0 to {self.num_layers - 1}"
            )
        if self.pad_id is not None and self.pad_id >= (self.vocab_size or math.inf):
            raise ValueError(
                f"model.pad_id: {self.pad_id} is not below model.vocab_size: {self.vocab_size}"
            )
        return self

    @model_validator(mode="after")
    def _graph_reads_plain_attention(self) -> Self:
        for section, each in self.feed_forwards().items():
            if not isinstance(each, SparseMoEConfig) or each.graph != "attention":
                continue
            for key, unused in (
                ("latent_attention", None),
                ("attention_sinks", False),
                ("sliding_window", None),
                ("attention_scale", None),
            ):
                if getattr(self, key) != unused:
                    raise ValueError(
                        f"{section}.graph: attention is not allowed with model.{key}: it reads "
                        "plain attention; allowed: none, similarity"
                    )
        return self

    def has_bias(self) -> bool:
        """See `ModelSettings.has_bias`."""
        return self.mlp_bias

    def filled(self) -> Self:
        """See `ModelSettings.filled`; heads and inner widths become numbers, too."""
        sections = {key: self._sized(each) for key, each in self.feed_forwards().items()}
        changes: dict[str, Any] = {}
        if self.latent_attention is None:
            changes["num_key_value_heads"] = self.known_key_value_heads()
            changes["head_size"] = self.known_head_size()
        return self.with_feed_forwards(sections).model_copy(update=changes)

    def _sized(self, each: FeedForwardConfig) -> FeedForwardConfig:
        """Returns a feed-forward with its inner widths as numbers."""
        if isinstance(each, DenseFeedForwardConfig):
            return each.model_copy(update={"hidden_size": each.inner_size(self.hidden_size)})
        if isinstance(each, SparseMoEConfig):
            dense = each.dense().inner_size(self.hidden_size)
            is_mixed = any(not each.routes(block) for block in range(self.num_layers))
            sizes = {
                "expert_hidden_size": each.inner_size(self.hidden_size),
                "dense_hidden_size": dense if is_mixed else None,
            }
            return each.model_copy(update=sizes)
        return each

    def heads_fit(self) -> bool:
        """Returns whether num_heads is free, so that it need not divide hidden_size."""
        return self.head_size is not None or self.latent_attention is not None

    def known_key_value_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_key_value_heads or self.num_heads

    def known_head_size(self) -> int:
        """Number of units of the query and key of one head."""
        if self.latent_attention is not None:
            return self.latent_attention.plain_size + self.latent_attention.rotated_size
        return self.head_size or self.hidden_size // self.num_heads

    def slides(self, block: int) -> bool:
        """Returns whether a block, given by its number from 0, has the sliding window."""
        return is_placed(self.sliding_window_blocks, block)

    def parts(self) -> DecoderParts:
        """See `DecoderSettings.parts`."""
        return DecoderParts(
            self.rotary,
            self._rotated_size(),
            self.pad_id,
            self.head_bias,
            self.embedding_multiplier,
            1 / self.logits_divisor,
        )

    def build_norm(self) -> nn.Module:
        """Builds a norm of the residual stream."""
        return build_norm(self.norm, self.hidden_size, self.norm_epsilon)

    def build_block(self, feed_forward: FeedForwardConfig, number: int) -> Block:
        """See `DecoderSettings.build_block`."""
        context = self.context(self.initializer_range, self.residual_std())
        attention = GroupedAttention if self.latent_attention is None else LatentAttention
        window = self.sliding_window if self.slides(number) else None
        return Block(
            attention(self, window),
            build_feedforward(feed_forward, context),
            build_norm=self.build_norm,
            residual_multiplier=self.residual_multiplier,
        )

    def cut_sizes(self) -> list[dict[str, int]]:
        """Heads, and the sizes of the feed-forward; the width is not split."""
        return [each for each in super().cut_sizes() if "model.hidden_size" not in each]

    def in_words(self) -> str:
        """Describes depth and width for the user."""
        return f"decoder, {self.num_layers} blocks, width {self.hidden_size}"

    def _rotated_size(self) -> int:
        latent = self.latent_attention
        return self.known_head_size() if latent is None else latent.rotated_size
