"""Embedding and output head with a vocabulary that is split over ranks, or padded on one.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary (of this rank, with padding).
"""

from torch import Tensor, nn

from polyad.model.bert import Bert
from polyad.model.decoder import Decoder
from polyad.model.heads import MaskedLanguageHead, VocabularyHead
from polyad.model.kernels.linear_cross_entropy import VocabularyPart
from polyad.model.layers import embed
from polyad.parallel import comm
from polyad.parallel.megatron import tensor_parallel_library
from polyad.parallel.regions import copy, highest_in_place, sum_parts, total_in_place
from polyad.parallel.sequence import Tokens
from polyad.parallel.shard import Axis, Placement, cut


def pad_vocabulary(model: nn.Module) -> None:
    """Pads the rows of a text model's embedding and output head, in place, if both are unsplit.

    As in a layout that splits them, padding exists only here: checkpoints and counts exclude it.

    Args:
        model: the model on the meta device.
    """
    if isinstance(model, Decoder | Bert):
        words = model.token_embedding.weight.shape[0]
        axis = Axis.part_of_vocabulary(words, 0, 1)
        if axis.size != words:
            _cut_rows(model, axis, VocabularyPart(0, words), replicated=True)


def cut_vocabulary(model: nn.Module, world: comm.World, tokens: Tokens | None) -> None:
    """Splits a text model's embedding and output head over the tensor-parallel ranks, in place.

    Args:
        model: the model on the meta device.
        world: this rank.
        tokens: how tokens are split between layers; None if every rank has all.
    """
    if not isinstance(model, Decoder | Bert):
        return
    words = model.token_embedding.weight.shape[0]
    rank, parts = world.tensor_parallel_rank, world.tensor_parallel_size
    axis = Axis.part_of_vocabulary(words, rank, parts)
    first, real = (axis.runs[0].there, axis.runs[0].length) if axis.runs else (0, 0)
    part = VocabularyPart(first, real, highest_in_place, total_in_place)
    _cut_rows(model, axis, part, replicated=False)
    model.token_embedding.lookup = _PartOfRows(first, real, tokens)
    if (head := _head(model)) is not None:
        head.input = copy if tokens is None else tokens.gather


def _cut_rows(model: Decoder | Bert, axis: Axis, part: VocabularyPart, *, replicated: bool) -> None:
    """Keeps this rank's rows of the embedding, and of the head's own parameters."""
    head = _head(model)
    owners: list[tuple[nn.Module, str]] = [(model.token_embedding, "weight")]
    if head is not None:
        owners += [(head, name) for name, _ in head.named_parameters()]
    for owner, name in owners:
        shape = tuple(owner.get_parameter(name).shape)
        cut(owner, name, Placement.cut(shape, {0: axis}, replicated=replicated))
    if head is not None:
        head.part = part


def _head(model: Decoder | Bert) -> VocabularyHead | None:
    """Returns the head that scores the vocabulary; class heads are small, and replicated."""
    head = model.head.decoder if isinstance(model.head, MaskedLanguageHead) else model.head
    return head if isinstance(head, VocabularyHead) else None


class _PartOfRows:
    """Looks up rows of an embedding of which this rank has some.

    Args:
        first: its first token id.
        real: number of its rows that are not padding.
        tokens: how tokens are split between layers; None if every rank has all.
    """

    def __init__(self, first: int, real: int, tokens: Tokens | None) -> None:
        self._first, self._last, self._tokens = first, first + real, tokens

    def __call__(self, ids_BT: Tensor, weight_VD: Tensor, pad_id: int | None = None) -> Tensor:
        elsewhere_BT = (ids_BT < self._first) | (ids_BT >= self._last)
        own_BT = (ids_BT - self._first).masked_fill(elsewhere_BT, 0)
        is_here = pad_id is not None and self._first <= pad_id < self._last
        own_pad = pad_id - self._first if pad_id is not None and is_here else None
        x_BTD = embed(own_BT, weight_VD, own_pad).masked_fill(elsewhere_BT.unsqueeze(-1), 0)
        if self._tokens is None:
            return sum_parts(x_BTD)
        self._tokens.shape = ids_BT.shape[0], ids_BT.shape[1]
        return self._tokens.sum_and_scatter(x_BTD)


def token_losses(logits_BTV: Tensor, target_ids_BT: Tensor) -> Tensor:
    """Computes the negative log-likelihood of every target, in nats, from vocabulary-split logits.

    Args:
        logits_BTV: this rank's part.
        target_ids_BT: the next token at each position.

    Returns:
        [B, T] in fp32, the same on every tensor-parallel rank.
    """
    each_BT: Tensor = tensor_parallel_library().vocab_parallel_cross_entropy(
        logits_BTV.float(), target_ids_BT
    )
    return each_BT
