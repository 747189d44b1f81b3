"""The decoder: a causal language model such as GPT-2, Llama and their mixtures of experts.

`GPT2Config` and `DecoderConfig` define its blocks. Source of GPT-2: Radford et al. 2019, "Language
models are unsupervised multitask learners", and the released code.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary, K classes, L blocks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyad.model.attention import GroupedAttention, KeyValueCache, LatentAttention, LatentConfig
from polyad.model.block import Block, FeedForwardConfig, build_block, build_feedforward, run_blocks
from polyad.model.config import Config, Count
from polyad.model.feedforward import Activation, BlockInput, DenseFeedForwardConfig, GatedActivation
from polyad.model.heads import ClassificationHeadConfig, SequenceHead, VocabularyHead
from polyad.model.initialization import normal
from polyad.model.layers import Embedding, LastToken, LayerNorm, RealTokens, RMSNorm
from polyad.model.output import ModelOutput
from polyad.model.rotary import RotaryConfig, rotation
from polyad.model.settings import TransformerSettings
from polyad.model.smoe.config import Placement, SelectingConfig, SparseMoEConfig, is_placed
from polyad.model.smoe.router import document_starts

REPLACED = "model.replaced.feed_forward"
"""The key of the feed-forward in the replaced blocks."""


class ReplacedConfig(Config):
    """Blocks whose feed-forward is replaced with another one."""

    blocks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """Numbers of these blocks, from 0."""
    feed_forward: FeedForwardConfig
    """The feed-forward of each of these blocks, instead of `model.feed_forward`; if it has experts,
    all of these blocks have them."""


class DecoderParts(NamedTuple):
    """Parts that only some decoders have: each is a key of the same name, where there is one."""

    rotary: RotaryConfig | None = None
    """The rotation of positions; None: positions are learned."""
    pad_id: int | None = None
    """The token whose embedding starts at zero and gets no gradient; None if there is none."""
    head_bias: bool = False
    """Whether the output head has a bias."""
    embedding_multiplier: float = 1.0
    """Factor of the token embedding (Granite)."""
    logits_divisor: float = 1.0
    """Divisor of the logits (Granite)."""


class DecoderSettings(TransformerSettings, ABC):
    """The base class of decoder configurations."""

    causal: ClassVar[bool] = True

    sequence_length: Count = 1024
    """Maximum input length in tokens, which is also the number of learned positions, if there are
    any."""
    vocab_size: Count | None = None
    """Vocabulary size V, in tokens; null: that of the data's tokenizer."""
    end_of_text_id: Annotated[int, Field(ge=0)] | None = None
    """ID of the token that ends each document, for feed-forwards whose training depends on document
    boundaries (model.feed_forward.pool); null: that of the data's tokenizer, where it is needed."""
    initializer_range: Annotated[float, Field(gt=0, le=1e6)] = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 L) for the last layer of each
    residual branch, with L blocks."""
    tied_embeddings: bool = True
    """Whether the output head shares its matrix with the token embedding; false: it has a matrix of
    its own, of the same size."""
    replaced: ReplacedConfig | None = None
    """Blocks that have another feed-forward instead of this one, as trained by `distill.blocks`;
    null: none."""
    head: ClassificationHeadConfig | None = None
    """A classification head for whole sequences; null: the model predicts the next token."""

    @model_validator(mode="after")
    def _replacement_fits(self) -> Self:
        if self.replaced is None:
            return self
        blocks, each = self.replaced.blocks, self.replaced.feed_forward
        if len(set(blocks)) < len(blocks) or max(blocks) >= self.num_layers:
            raise ValueError(
                f"model.replaced.blocks: {blocks} is not allowed: list blocks from 0 to "
                f"{self.num_layers - 1}, each at most once"
            )
        if isinstance(each, SelectingConfig) and (
            placement := getattr(each, each.placement_key)
        ) not in (1, blocks):
            raise ValueError(
                f"{REPLACED}.{each.placement_key}: {placement} is not allowed: "
                "model.replaced.blocks says which blocks have experts; allowed: 1"
            )
        return self

    def feed_forward_widths(self) -> dict[str, int]:
        """The width of the residual stream, also for the feed-forward of replaced blocks."""
        replaced = {} if self.replaced is None else {REPLACED: self.hidden_size}
        return super().feed_forward_widths() | replaced

    def block_feed_forwards(self) -> list[FeedForwardConfig]:
        """The feed-forward of each block."""
        sections = super().block_feed_forwards()
        for block in self.replaced_blocks():
            sections[block] = self.feed_forwards()[REPLACED]
        return sections

    def replaced_blocks(self) -> list[int]:
        """The numbers of the blocks with another feed-forward, in order."""
        return [] if self.replaced is None else sorted(self.replaced.blocks)

    def original(self) -> Self:
        """Returns the model with its own feed-forward in every block."""
        return self.model_copy(update={"replaced": None})

    @abstractmethod
    def build_block(self, feed_forward: FeedForwardConfig, number: int) -> Block:
        """Builds a block, on the current default device.

        Args:
            feed_forward: The feed-forward of the block.
            number: Number of the block, from 0.
        """

    def rotated_size(self) -> int:
        """Returns the number of rotated units of a head."""
        return 0

    def residual_std(self) -> float:
        """Standard deviation of the initial weights whose output is added to the residual stream.

        2 L branches add to it; the scale keeps its variance independent of depth (Radford et al.
        2019, section 2.3).
        """
        return self.initializer_range / math.sqrt(2 * self.num_layers)

    def units_per_sample(self) -> int:
        """Number of predicted tokens per sample; 1 if a whole sequence is scored."""
        return self.sequence_length if self.head is None else 1

    def reads_documents(self) -> bool:
        """Whether training depends on document boundaries in a text. A sequence that is scored as a
        whole is one document."""
        sections = self.feed_forwards().values()
        return self.head is None and any(each.reads_documents() for each in sections)

    def from_data(self) -> dict[str, int | None]:
        """The vocabulary size, the end of documents and the number of classes, if they are used."""
        values = {"vocab_size": self.vocab_size}
        if self.reads_documents():
            values["end_of_text_id"] = self.end_of_text_id
        if self.head is not None:
            values["head.num_classes"] = self.head.num_classes
        return values


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
        """Builds a block; see `DecoderSettings.build_block`."""
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
    norm: Literal["rms", "rms_rounded_last", "layer"] = "rms"
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
        if self.rotary is not None and self.rotated_size() % 2:
            key = "head_size" if self.latent_attention is None else "latent_attention.rotated_size"
            raise ValueError(
                f"model.{key}: {self.rotated_size()} is odd, but units are rotated in pairs"
            )
        if self.latent_attention is not None:
            for key, value in self.changed(
                "num_key_value_heads", "head_size", "query_key_norm", "query_key_value_clip"
            ).items():
                raise ValueError(
                    f"model.{key}: {value} is not allowed with model.latent_attention, which has "
                    f"keys of its own; allowed: {'none' if key == 'query_key_norm' else 'null'}"
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
            for key in self.changed(
                "latent_attention", "attention_sinks", "sliding_window", "attention_scale"
            ):
                raise ValueError(
                    f"{section}.graph: attention is not allowed with model.{key}: it reads plain "
                    "attention; allowed: none, similarity"
                )
        return self

    def has_bias(self) -> bool:
        """Whether layers have a bias; see `ModelSettings.has_bias`."""
        return self.mlp_bias

    def filled(self) -> Self:
        """Fills in as `ModelSettings.filled`; heads and inner widths become numbers, too."""
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

    def build_norm(self) -> nn.Module:
        """Builds a norm of the residual stream."""
        if self.norm == "layer":
            return LayerNorm(self.hidden_size, eps=self.norm_epsilon)
        rounded_last = self.norm == "rms_rounded_last"
        return RMSNorm(self.hidden_size, self.norm_epsilon, rounded_last=rounded_last)

    def build_block(self, feed_forward: FeedForwardConfig, number: int) -> Block:
        """Builds a block; see `DecoderSettings.build_block`."""
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

    def rotated_size(self) -> int:
        """Returns the number of rotated units of a head; of latent attention its own."""
        latent = self.latent_attention
        return self.known_head_size() if latent is None else latent.rotated_size


class Decoder(nn.Module):
    """A decoder-only transformer.

    Construct it with `build_model` and fill it with `materialize`, both in `model/build.py`. The
    constructor alone leaves PyTorch's default initial values, which are not the model's.

    Args:
        config: Its configuration, with the vocabulary size filled in.

    Raises:
        ValueError: The vocabulary size, or a token that training needs, is None.
    """

    distilled_blocks: tuple[int, ...] = ()
    """Numbers of the blocks whose feed-forwards alone are trained, each on its own input: the rest
    is in evaluation mode, and blocks after the last of them do not run. Empty: everything is
    trained."""

    def __init__(self, config: DecoderSettings) -> None:
        super().__init__()
        self.config = config
        own = {key: value for key, value in config if key in DecoderParts._fields}
        self.parts = DecoderParts(**own)
        width, vocab_size = config.hidden_size, config.number("vocab_size")
        start = normal(config.initializer_range)
        self.token_embedding = Embedding(vocab_size, width, start, self.parts.pad_id)
        self.position_embedding: Embedding | None = None
        if self.parts.rotary is None:
            self.position_embedding = Embedding(config.sequence_length, width, start)
        self.dropout = nn.Dropout(config.dropout)
        feed_forwards = config.block_feed_forwards()
        self.blocks = nn.ModuleList(
            config.build_block(feed_forward, number)
            for number, feed_forward in enumerate(feed_forwards)
        )
        self.final_norm = config.build_norm()
        self.head: nn.Module = VocabularyHead(
            vocab_size,
            None if config.tied_embeddings else width,
            bias=self.parts.head_bias,
            initializer_std=config.initializer_range,
        )
        self.last_token: LastToken | None = None
        if config.head is not None:
            self.last_token = LastToken()
            dropout = config.head.known_dropout(config.dropout)
            classes = config.number("head.num_classes")
            self.head = SequenceHead(width, classes, dropout, config.initializer_range)
        self._routes = config.has_experts()
        self._end_of_text_id: int | None = None
        if config.reads_documents():
            self._end_of_text_id = config.number("end_of_text_id")

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of all modules, or only of those in `distilled_blocks`."""
        super().train(mode and not self.distilled_blocks)
        for block in self.distilled_blocks:
            self.blocks.get_submodule(f"{block}.feed_forward").train(mode)
        return self

    def forward(
        self,
        input_ids_BT: Tensor,
        cache: KeyValueCache | None = None,
        target_ids_BT: Tensor | None = None,
        mask_BT: Tensor | None = None,
    ) -> ModelOutput:
        """Predicts the next token at every position, or scores whole sequences.

        Args:
            input_ids_BT: Token ids, T at most `sequence_length`.
            cache: In generation, keys and values of earlier tokens, to which those of these are
                added.
            target_ids_BT: The next token at each position; only used to return the loss.
            mask_BT: True for real tokens, which precede the padding of their sequence; None if
                there is no padding.

        Returns:
            Logits [B, T, V]. With targets instead the mean loss, or without gradients the loss of
            each target [B, T]; a head that scores sequences returns [B, K]. Also one `RoutingStats`
            per block whose feed-forward routes.

        Raises:
            ValueError: The input, including the cached tokens, is longer than `sequence_length`.
        """
        start = 0 if cache is None else cache.length
        length = start + input_ids_BT.shape[1]
        self.config.check_length(length)
        positions_T = torch.arange(start, length, device=input_ids_BT.device)
        x_BTD = self.embed(input_ids_BT, positions_T)
        given = self.given(positions_T, x_BTD.dtype, mask_BT)
        last = self.distilled_blocks[-1] if self.distilled_blocks else -1
        stops = self.distilled_blocks and self.blocks.get_submodule(f"{last}.feed_forward").training
        if self._end_of_text_id is not None and (self.training or stops):
            starts_BT = document_starts(input_ids_BT, self._end_of_text_id)
            given = given._replace(document_start_BT=starts_BT)
        blocks: Iterable[nn.Module] = list(self.blocks)[: last + 1] if stops else self.blocks
        x_BTD, routing = run_blocks(blocks, x_BTD, self.config.recompute, given, cache)
        if stops:
            return ModelOutput(x_BTD.new_zeros(()), routing)
        if self.last_token is not None:
            last_BD = self.last_token(x_BTD, mask_BT)
            return ModelOutput(self.head(self.final_norm(last_BD)), routing)
        return ModelOutput(self.score(x_BTD, target_ids_BT), routing)

    def given(
        self, positions_T: Tensor, dtype: torch.dtype, mask_BT: Tensor | None = None
    ) -> BlockInput:
        """Returns what blocks read besides the residual stream.

        Args:
            positions_T: Positions of the tokens.
            dtype: Precision of the residual stream.
            mask_BT: See `forward`.
        """
        real = RealTokens.of(mask_BT) if self._routes else None
        turn, rotary = None, self.parts.rotary
        if rotary is not None:
            turn = rotation(rotary, self.config.rotated_size(), positions_T, dtype)
        return BlockInput(real=real, rotation=turn)

    def embed(self, input_ids_BT: Tensor, positions_T: Tensor) -> Tensor:
        """Returns the input of the first block [B, T, D]."""
        x_BTD = self.token_embedding(input_ids_BT)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(positions_T)
        if self.parts.embedding_multiplier != 1:
            x_BTD = x_BTD * self.parts.embedding_multiplier
        embedded_BTD: Tensor = self.dropout(x_BTD)
        return embedded_BTD

    def score(self, x_BTD: Tensor, target_ids_BT: Tensor | None = None) -> Tensor:
        """Computes logits [B, T, V] from the last block's output; with targets see `forward`."""
        # Accessed only if needed: ZeRO 3 would gather it.
        embedding_VD = self.token_embedding.weight if self.config.tied_embeddings else None
        normalized_BTD = self.final_norm(x_BTD)
        if self.parts.logits_divisor != 1:
            normalized_BTD = normalized_BTD * (1 / self.parts.logits_divisor)
        scored: Tensor = self.head(normalized_BTD, embedding_VD, target_ids_BT)
        return scored
