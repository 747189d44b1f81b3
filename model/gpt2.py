"""GPT-2, with a feed-forward of any kind in its blocks.

Source: Radford et al. 2019, "Language models are unsupervised multitask learners", and the released
code.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary, K classes, L blocks.
"""

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyad.model.attention import KeyValueCache
from polyad.model.block import Block, FeedForwardConfig, build_block, run_blocks
from polyad.model.feedforward import BlockInput, DenseFeedForwardConfig, FeedForwardContext
from polyad.model.heads import ClassificationHeadConfig, SequenceHead, VocabularyHead
from polyad.model.initialization import Initializer, norm_initializers, normal
from polyad.model.kernels.linear_cross_entropy import losses
from polyad.model.layers import Embedding, LayerNorm
from polyad.model.output import ModelOutput
from polyad.model.padding import LastToken, RealTokens
from polyad.model.settings import Count, TransformerSettings


class GPT2Config(TransformerSettings):
    """The defaults are the 124M model's."""

    embeddings: ClassVar[tuple[str, ...]] = ("token_embedding", "position_embedding", "head")
    causal: ClassVar[bool] = True

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

    def known_vocab_size(self) -> int:
        """The vocabulary size, which must have been filled in.

        Raises:
            ValueError: It is not known yet.
        """
        if self.vocab_size is None:
            raise ValueError(
                "model.vocab_size is not set: give a number, or take it from the data's tokenizer"
            )
        return self.vocab_size

    def units_per_sample(self) -> int:
        """Tokens that are predicted in a sample; 1 where a whole sequence is scored."""
        return self.sequence_length if self.head is None else 1

    def left_to_data(self) -> str | None:
        """The key of the vocabulary size, or of the number of classes, unless they are set."""
        if self.vocab_size is None:
            return "model.vocab_size"
        unknown = self.head is not None and self.head.num_classes is None
        return "model.head.num_classes" if unknown else None

    def in_words(self) -> str:
        """The depth and width, for people."""
        return f"GPT-2, {self.num_layers} blocks, width {self.hidden_size}"


class TiedHead(VocabularyHead):
    """The output head; it has no parameters and borrows the token embedding's."""

    def forward(
        self, x_BTD: Tensor, weight_VD: Tensor, target_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Scores every token of the vocabulary.

        Args:
            x_BTD: The residual stream after the last LayerNorm.
            weight_VD: The token embedding.
            target_ids_BT: The right tokens, for a loss.

        Returns:
            Logits [B, T, V]; with targets what `losses` says, and no logits are kept.
        """
        if target_ids_BT is not None:
            return losses(self.input(x_BTD), weight_VD, target_ids_BT, self.part)
        return self.logits(x_BTD, weight_VD)


class UntiedHead(VocabularyHead):
    """The output head with a matrix of its own.

    Args:
        vocab_size: V.
        width: D.
        initializer_std: Standard deviation of the initial weights.
    """

    def __init__(self, vocab_size: int, width: int, initializer_std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self._initializer_std = initializer_std

    def initializers(self) -> dict[str, Initializer]:
        """Starts as the token embedding does; see `model/initialization.py`."""
        return {"weight": normal(self._initializer_std)}

    def forward(
        self,
        x_BTD: Tensor,
        embedding_VD: Tensor | None = None,
        target_ids_BT: Tensor | None = None,
    ) -> Tensor:
        """Scores every token of the vocabulary.

        Args:
            x_BTD: The residual stream after the last LayerNorm.
            embedding_VD: None; the tied head takes it.
            target_ids_BT: The right tokens, for a loss.

        Returns:
            Logits [B, T, V]; with targets what `losses` says, and no logits are kept.
        """
        if target_ids_BT is not None:
            return losses(self.input(x_BTD), self.weight, target_ids_BT, self.part)
        return self.logits(x_BTD, self.weight)


class GPT2(nn.Module):
    """A decoder-only transformer with learned positions.

    Construct it with `build_model` and fill it with `materialize`: both in `model/build.py`. On its
    own the constructor leaves PyTorch's default initial values, which are not GPT-2's.

    Args:
        config: Its configuration, with the vocabulary size filled in.

    Raises:
        ValueError: The vocabulary size is None.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.token_embedding = Embedding(config.known_vocab_size(), width)
        self.position_embedding = Embedding(config.sequence_length, width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            _build_block(config, feed_forward) for feed_forward in config.block_feed_forwards()
        )
        self.final_norm = LayerNorm(width, eps=config.layer_norm_epsilon, bias=config.bias)
        self.head: nn.Module = TiedHead()
        self.last_token: LastToken | None = None
        if config.head is not None:
            self.last_token = LastToken()
            dropout = config.head.known_dropout(config.dropout)
            self.head = SequenceHead(config.head, width, dropout, config.initializer_range)
        elif not config.tied_embeddings:
            self.head = UntiedHead(config.known_vocab_size(), width, config.initializer_range)
        self._routes = any(each.kind != "dense" for each in config.block_feed_forwards())

    def initializers(self) -> dict[str, Initializer]:
        """Says how each parameter outside the blocks starts; see `model/initialization.py`."""
        return {
            "token_embedding.weight": normal(self.config.initializer_range),
            "position_embedding.weight": normal(self.config.initializer_range),
            **norm_initializers("final_norm", self.final_norm),
        }

    def forward(
        self,
        input_ids_BT: Tensor,
        cache: KeyValueCache | None = None,
        target_ids_BT: Tensor | None = None,
        mask_BT: Tensor | None = None,
    ) -> ModelOutput:
        """Predicts, at every position, the token after it; or scores sequences as wholes.

        Args:
            input_ids_BT: Token ids, T at most `sequence_length`.
            cache: In generation: keys and values of earlier tokens; those of these are added.
            target_ids_BT: The token after each position, for the loss alone.
            mask_BT: True for real tokens, which stand before the padding of their sequence; None:
                all are.

        Returns:
            Logits [B, T, V], or in their place, with targets, the mean loss, and without gradients
            the loss of each target [B, T]; of a head that scores sequences [B, K]. And one
            `RoutingStats` per block whose feed-forward routes.

        Raises:
            ValueError: The input, with what is in the cache, is longer than `sequence_length`.
        """
        start = 0 if cache is None else cache.length
        length = start + input_ids_BT.shape[1]
        if length > self.config.sequence_length:
            raise ValueError(
                f"input of {length} tokens; model.sequence_length allows at most "
                f"{self.config.sequence_length}"
            )
        positions_T = torch.arange(start, length, device=input_ids_BT.device)
        x_BTD = self.embed(input_ids_BT, positions_T)
        given = BlockInput(real=RealTokens.of(mask_BT) if self._routes else None)
        x_BTD, routing = run_blocks(self.blocks, x_BTD, self.config.recompute, given, cache)
        if self.last_token is not None:
            return ModelOutput(self.classify(x_BTD, mask_BT), routing)
        return ModelOutput(self.score(x_BTD, target_ids_BT), routing)

    def embed(self, input_ids_BT: Tensor, positions_T: Tensor) -> Tensor:
        """What the first block gets [B, T, D]."""
        x_BTD = self.token_embedding(input_ids_BT) + self.position_embedding(positions_T)
        embedded_BTD: Tensor = self.dropout(x_BTD)
        return embedded_BTD

    def score(self, x_BTD: Tensor, target_ids_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] from what the last block gives; with targets see `forward`."""
        # Read only if it is needed: ZeRO 3 would gather it.
        embedding_VD = self.token_embedding.weight if self.config.tied_embeddings else None
        scored: Tensor = self.head(self.final_norm(x_BTD), embedding_VD, target_ids_BT)
        return scored

    def classify(self, x_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Scores of sequences [B, K] from what the last block gives at their last real tokens."""
        assert self.last_token is not None
        scored: Tensor = self.head(self.final_norm(self.last_token(x_BTD, mask_BT)))
        return scored


def _build_block(config: GPT2Config, feed_forward: FeedForwardConfig) -> Block:
    # 2 L branches add to the residual stream; the scale keeps its variance independent of depth
    # (Radford et al. 2019, section 2.3).
    residual_std = config.initializer_range / math.sqrt(2 * config.num_layers)
    context = FeedForwardContext(
        hidden_size=config.hidden_size,
        bias=config.bias,
        dropout=config.dropout,
        initializer_std=config.initializer_range,
        residual_std=residual_std,
        num_heads=config.num_heads,
        causal=True,
    )
    return build_block(feed_forward, context, layer_norm_epsilon=config.layer_norm_epsilon)
