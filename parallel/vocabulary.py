"""The output head over a vocabulary that is cut between processes, or padded on one.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary (of this process, with padding).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.bert import Bert
from polyad.model.gpt2 import GPT2, UntiedHead
from polyad.model.heads import MaskedLanguageHead
from polyad.model.kernels.linear_cross_entropy import VocabularyPart, losses, scores
from polyad.model.layers import Embedding
from polyad.parallel.megatron import tensor_parallel_library
from polyad.parallel.placement import Placement, placement_of, split_padded
from polyad.parallel.regions import highest_in_place, total_in_place


def pad_vocabulary(model: nn.Module) -> None:
    """Rounds the rows of the embedding and output head of text up, in place, where both are whole.

    As in a layout that cuts them the padding exists only here: no checkpoint and no count has it.

    Args:
        model: on the meta device.
    """
    if not isinstance(model, GPT2 | Bert):
        return
    shape = tuple(model.token_embedding.weight.shape)
    place = split_padded(shape, 0, 1)
    if place.shape == shape:
        return
    with torch.device("meta"):
        embedding = Embedding(place.shape[0], place.shape[1])
        embedding.weight.placement = place  # type: ignore[attr-defined]
        whole = VocabularyPart(0, shape[0], _same, _same)
        if isinstance(model, Bert):
            if isinstance(model.head, MaskedLanguageHead):
                decoder = ParallelDecoder(_same, whole, place.shape[0])
                decoder.bias.placement = split_padded(shape[:1], 0, 1)  # type: ignore[attr-defined]
                model.head.add_module("decoder", decoder)
        else:
            head = ParallelHead(_same, whole)
            if isinstance(model.head, UntiedHead):
                head.weight = nn.Parameter(torch.empty(place.shape))
                head.weight.placement = place  # type: ignore[attr-defined]
            if model.last_token is None:
                model.add_module("head", head)
    model.add_module("token_embedding", embedding)


def _same(values: Tensor) -> Tensor:
    return values


def part_of(embedding: nn.Module) -> tuple[Placement, VocabularyPart]:
    """Where the rows of a cut embedding are, and which of the vocabulary they are."""
    weight = embedding.weight
    assert isinstance(weight, nn.Parameter)
    place = placement_of(weight)
    real = sum(piece.num_rows for piece in place.pieces)
    first = place.pieces[0].origin[0] if real else 0
    return place, VocabularyPart(first, real, highest_in_place, total_in_place)


def token_losses(logits_BTV: Tensor, target_ids_BT: Tensor) -> Tensor:
    """Negative log-likelihood of every target, in nats, from logits cut by vocabulary.

    Args:
        logits_BTV: this process's part.
        target_ids_BT: the token that follows each position.

    Returns:
        [B, T] in fp32, the same on every tensor-parallel process.
    """
    each_BT: Tensor = tensor_parallel_library().vocab_parallel_cross_entropy(
        logits_BTV.float(), target_ids_BT
    )
    return each_BT


class ParallelHead(nn.Module):
    """The output head: logits of this process's part of the vocabulary, or a loss over all parts.

    Args:
        copy: identity, whose gradient is summed over the tensor-parallel processes.
        part: this process's.
    """

    weight: nn.Parameter | None

    def __init__(self, copy: Callable[[Tensor], Tensor], part: VocabularyPart) -> None:
        super().__init__()
        self._copy, self._part = copy, part
        self.register_parameter("weight", None)  # of its own, unless the embedding is the head

    def forward(
        self, x_BTD: Tensor, embedding_VD: Tensor | None, target_ids_BT: Tensor | None = None
    ) -> Tensor:
        """As `TiedHead.forward`, over this part of the vocabulary."""
        weight_VD = self.weight if embedding_VD is None else embedding_VD
        assert weight_VD is not None
        if target_ids_BT is not None:
            return losses(self._copy(x_BTD), weight_VD, target_ids_BT, self._part)
        return self._real(linear(self._copy(x_BTD), weight_VD))

    def _real(self, logits_BTV: Tensor) -> Tensor:
        """Logits without those of padding, or with the lowest number in their place."""
        if self._copy is _same:
            return logits_BTV[..., : self._part.real]
        rows = logits_BTV.shape[-1]
        if self._part.real == rows:
            return logits_BTV
        padding_V = torch.arange(rows, device=logits_BTV.device) >= self._part.real
        return logits_BTV.masked_fill(padding_V, torch.finfo(logits_BTV.dtype).min)


class ParallelDecoder(ParallelHead):
    """The last product of a masked language model's head, with its part of the bias.

    Args:
        copy: as `ParallelHead` has it.
        part: this process's.
        rows: of that part, with padding.
    """

    bias: nn.Parameter

    def __init__(self, copy: Callable[[Tensor], Tensor], part: VocabularyPart, rows: int) -> None:
        super().__init__(copy, part)
        self.bias = nn.Parameter(torch.empty(rows))

    def forward(
        self, x_BTD: Tensor, embedding_VD: Tensor | None, target_ids_BT: Tensor | None = None
    ) -> Tensor:
        """As `TiedHead.forward`, with a bias."""
        assert embedding_VD is not None
        if target_ids_BT is not None:
            return scores(self._copy(x_BTD), embedding_VD, target_ids_BT, self._part, self.bias)
        return self._real(linear(self._copy(x_BTD), embedding_VD, self.bias))
