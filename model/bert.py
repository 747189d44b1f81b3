"""BERT, with a feed-forward of any kind in its blocks.

A bidirectional encoder: every token attends to all tokens except padding. The head uses its output
to predict masked tokens or a class, or there is no head.

Source: Devlin et al. 2019, "BERT: pre-training of deep bidirectional transformers for language
understanding", and the released code.

Shapes: B batch, T tokens in a sequence, P scored positions, D width, V vocabulary, K classes, L
blocks.
"""

from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from polyad.model.block import PostNormBlock, build_block, run_blocks
from polyad.model.config import Config, Count
from polyad.model.feedforward import Activation, BlockInput
from polyad.model.heads import (
    ClassificationHead,
    ClassificationHeadConfig,
    MaskedLanguageHead,
    Pooler,
)
from polyad.model.initialization import normal
from polyad.model.layers import Embedding, RealTokens
from polyad.model.output import ModelOutput
from polyad.model.settings import TransformerSettings


class MaskedLanguageHeadConfig(Config):
    """A masked language model head: logits over the vocabulary for each masked position."""

    kind: Literal["language"] = "language"
    """The kind of head."""
    masked_share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of the positions of a sample that are predicted in training."""

    def num_masked(self, length: int) -> int:
        """Returns the number of predicted positions per sample: at least one, excluding both ends.

        Args:
            length: T.
        """
        return min(length - 2, max(1, round(self.masked_share * length)))


class NoHeadConfig(Config):
    """No head: the encoder alone, to read its output; cannot be trained."""

    kind: Literal["none"] = "none"
    """The kind of head."""
    pooler: bool = True
    """Whether it has the pooler, a linear layer with tanh for the first token."""


HeadConfig: TypeAlias = Annotated[
    MaskedLanguageHeadConfig | ClassificationHeadConfig | NoHeadConfig, Field(discriminator="kind")
]


class BertConfig(TransformerSettings):
    """BERT; the defaults are those of BERT-base, without dropout."""

    kind: Literal["bert"] = "bert"
    """The kind of model."""
    sequence_length: Annotated[int, Field(ge=3, le=2**31 - 1)] = 512
    """Maximum input length in tokens, which is also the number of learned positions. The first and
    the last token of a training sample mark its ends."""
    vocab_size: Count | None = None
    """Vocabulary size V, in tokens; null: that of the data's tokenizer."""
    num_segments: Count = 2
    """Number of segment (token type) embeddings, for example for the first and the second text of a
    pair."""
    layer_norm_epsilon: Annotated[float, Field(gt=0, le=1e6)] = 1e-12
    """Epsilon that is added to the variance in every LayerNorm."""
    activation: Activation = "gelu"
    """Activation of dense feed-forwards and of the language model head: `gelu` (exact), `gelu_tanh`
    (its tanh approximation), `quick_gelu` (x sigmoid(1.702 x)) or `relu`. Sparse experts have their
    own key, model.feed_forward.activation."""
    initializer_range: Annotated[float, Field(gt=0, le=1e6)] = 0.02
    """Standard deviation of the initial weights."""
    head: HeadConfig = MaskedLanguageHeadConfig()
    """The output head."""

    def units_per_sample(self) -> int:
        """Number of tokens read per sample; 1 if a whole sequence is scored."""
        return 1 if self.head.kind == "classification" else self.sequence_length

    def from_data(self) -> dict[str, int | None]:
        """The vocabulary size, and the number of classes if there are any."""
        values = {"vocab_size": self.vocab_size}
        if isinstance(self.head, ClassificationHeadConfig):
            values["head.num_classes"] = self.head.num_classes
        return values

    def in_words(self) -> str:
        """Describes depth and width for the user."""
        return f"BERT, {self.num_layers} blocks, width {self.hidden_size}"


class Bert(nn.Module):
    """A BERT; see `Decoder` for how a model is built and filled.

    Args:
        config: Its configuration, with all values from the data filled in.

    Raises:
        ValueError: The vocabulary size, or the number of classes, is None.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        width, start = config.hidden_size, normal(config.initializer_range)
        self.token_embedding = Embedding(config.number("vocab_size"), width, start)
        self.position_embedding = Embedding(config.sequence_length, width, start)
        self.segment_embedding = Embedding(config.num_segments, width, start)
        self.embedding_norm = config.build_norm()
        self.dropout = nn.Dropout(config.dropout)
        context = config.context(config.initializer_range)
        self.blocks = nn.ModuleList(
            build_block(each, context, config.build_norm, kind=PostNormBlock)
            for each in config.block_feed_forwards()
        )
        self.head = _build_head(config)
        self._routes = config.has_experts()

    def forward(
        self,
        input_ids_BT: Tensor,
        mask_BT: Tensor | None = None,
        segments_BT: Tensor | None = None,
        positions_BP: Tensor | None = None,
        target_ids_BP: Tensor | None = None,
    ) -> ModelOutput:
        """Encodes sequences and applies the head.

        Args:
            input_ids_BT: Token ids, T at most `sequence_length`.
            mask_BT: True for tokens, False for padding, which is excluded from attention, experts
                and routing statistics; None if there is no padding. No row may be all padding.
            segments_BT: Segment of each token, below `num_segments`; None: all in the first.
            positions_BP: The positions that the language head scores; None for all.
            target_ids_BP: The targets at these positions, for the loss of the language head.

        Returns:
            As logits the output of the head: for the language head logits [B, P, V], or with
            targets the mean loss, or without gradients [B, P, 2] with the loss of each target and 1
            where no token has a higher logit; for a classification head logits [B, K]; without a
            head the last block's output [B, T, D]. Also one `RoutingStats` per block that routes.

        Raises:
            ValueError: The input is longer than `sequence_length`.
        """
        length = input_ids_BT.shape[1]
        self.config.check_length(length)
        x_BTD = self.embed(input_ids_BT, segments_BT)
        given = BlockInput(mask_BT, RealTokens.of(mask_BT) if self._routes else None)
        x_BTD, routing = run_blocks(self.blocks, x_BTD, self.config.recompute, given)
        return ModelOutput(self.score(x_BTD, positions_BP, target_ids_BP), routing)

    def embed(self, input_ids_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        """Returns the input of the first block [B, T, D]."""
        positions_T = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)
        if segments_BT is None:
            segments_BT = torch.zeros_like(input_ids_BT)
        x_BTD = self.token_embedding(input_ids_BT) + self.segment_embedding(segments_BT)
        x_BTD = x_BTD + self.position_embedding(positions_T)
        embedded_BTD: Tensor = self.dropout(self.embedding_norm(x_BTD))
        return embedded_BTD

    def score(
        self,
        x_BTD: Tensor,
        positions_BP: Tensor | None = None,
        target_ids_BP: Tensor | None = None,
    ) -> Tensor:
        """Applies the head to the last block's output; see `forward`."""
        if isinstance(self.head, MaskedLanguageHead):
            if positions_BP is not None:
                index_BPD = positions_BP.unsqueeze(-1).expand(-1, -1, x_BTD.shape[-1])
                x_BTD = x_BTD.gather(1, index_BPD)
            scored: Tensor = self.head(x_BTD, self.token_embedding.weight, target_ids_BP)
            return scored
        if isinstance(self.head, ClassificationHead):
            logits_BK: Tensor = self.head(x_BTD)
            return logits_BK
        return x_BTD


def _build_head(config: BertConfig) -> nn.Module:
    head, width, std = config.head, config.hidden_size, config.initializer_range
    if isinstance(head, MaskedLanguageHeadConfig):
        return MaskedLanguageHead(config)
    if isinstance(head, ClassificationHeadConfig):
        dropout = head.known_dropout(config.dropout)
        return ClassificationHead(width, config.number("head.num_classes"), dropout, std)
    return nn.ModuleDict({"pooler": Pooler(width, std)} if head.pooler else {})
