"""The decoder: a causal language model such as GPT-2, Llama and their mixtures of experts.

`GPT2Config` and `DecoderConfig` (`model/decoder_config.py`) define its blocks.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary, K classes, L blocks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyad.model.attention import KeyValueCache
from polyad.model.block import Block, FeedForwardConfig, run_blocks
from polyad.model.config import Config, Count
from polyad.model.feedforward import BlockInput
from polyad.model.heads import ClassificationHeadConfig, SequenceHead, VocabularyHead
from polyad.model.initialization import normal
from polyad.model.layers import Embedding, LastToken, RealTokens
from polyad.model.output import ModelOutput
from polyad.model.rotary import RotaryConfig, rotation
from polyad.model.settings import TransformerSettings
from polyad.model.smoe.config import SelectingConfig
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
    """Parts that only some decoders have."""

    rotary: RotaryConfig | None = None
    """The rotation of positions; None: positions are learned."""
    rotated_size: int = 0
    """Number of rotated units of a head."""
    pad_id: int | None = None
    """The token whose embedding starts at zero and gets no gradient; None if there is none."""
    head_bias: bool = False
    """Whether the output head has a bias."""
    embedding_multiplier: float = 1.0
    """Factor of the token embedding (Granite)."""
    logits_multiplier: float = 1.0
    """Factor of the logits (Granite)."""


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
        self.check_feed_forward(REPLACED, each, self.hidden_size, self.num_heads)
        return self

    def feed_forwards(self) -> dict[str, FeedForwardConfig]:
        """The feed-forward, and that of replaced blocks, with all defaults filled in, by key."""
        sections = super().feed_forwards()
        if self.replaced is not None:
            each = self.replaced.feed_forward
            sections[REPLACED] = each.of_model(width=self.hidden_size, bias=self.has_bias())
        return sections

    def with_feed_forwards(self, sections: Mapping[str, FeedForwardConfig]) -> Self:
        """Returns the same model with other feed-forwards, including those of replaced blocks."""
        others = {key: each for key, each in sections.items() if key != REPLACED}
        config = super().with_feed_forwards(others)
        if self.replaced is None or REPLACED not in sections:
            return config
        update = {"feed_forward": sections[REPLACED]}
        return config.model_copy(update={"replaced": self.replaced.model_copy(update=update)})

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

    def parts(self) -> DecoderParts:
        """Returns the parts that only some decoders have; by default none."""
        return DecoderParts()

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
        self.config, self.parts = config, config.parts()
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
        self._routes = any(each.kind != "dense" for each in feed_forwards)
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
            turn = rotation(rotary, self.parts.rotated_size, positions_T, dtype)
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
        if self.parts.logits_multiplier != 1:
            normalized_BTD = normalized_BTD * self.parts.logits_multiplier
        scored: Tensor = self.head(normalized_BTD, embedding_VD, target_ids_BT)
        return scored
