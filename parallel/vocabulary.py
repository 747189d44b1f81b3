"""Embedding and output head of a vocabulary that is cut between processes, or padded on one.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary (of this process, with padding).
"""

from torch import Tensor, nn

from polyad.model.bert import Bert
from polyad.model.decoder import Decoder
from polyad.model.heads import MaskedLanguageHead, MaskedTokenDecoder, UntiedHead, VocabularyHead
from polyad.model.kernels.linear_cross_entropy import VocabularyPart
from polyad.model.layers import embed
from polyad.parallel import comm
from polyad.parallel.megatron import tensor_parallel_library
from polyad.parallel.regions import copy, highest_in_place, sum_parts, total_in_place
from polyad.parallel.sequence import Tokens
from polyad.parallel.shard import Axis, Placement, cut


def pad_vocabulary(model: nn.Module) -> None:
    """Rounds the rows of the embedding and output head of text up, in place, where both are whole.

    As in a layout that cuts them the padding exists only here: no checkpoint and no count has it.

    Args:
        model: on the meta device.
    """
    if isinstance(model, Decoder | Bert):
        words = model.token_embedding.weight.shape[0]
        axis = Axis.part_of_vocabulary(words, 0, 1)
        if axis.size != words:
            _cut_rows(model, axis, VocabularyPart(0, words), replicated=True)


def cut_vocabulary(model: nn.Module, world: comm.World, tokens: Tokens | None) -> None:
    """Cuts the embedding and output head of text over the tensor-parallel processes, in place.

    Args:
        model: on the meta device.
        world: this process.
        tokens: how tokens are cut between layers; None: every process has all.
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
    """Has a process keep some rows of the embedding, and of what the head has of its own."""
    head = _head(model)
    owners: list[tuple[nn.Module, str]] = [(model.token_embedding, "weight")]
    if isinstance(head, UntiedHead):
        owners += [(head, name) for name, _ in head.named_parameters()]
    elif isinstance(head, MaskedTokenDecoder):
        owners.append((head, "bias"))
    for owner, name in owners:
        shape = tuple(owner.get_parameter(name).shape)
        cut(owner, name, Placement.cut(shape, {0: axis}, replicated=replicated))
    if head is not None:
        head.part = part


def _head(model: Decoder | Bert) -> VocabularyHead | None:
    """The head that scores the vocabulary; those of classes are small, and each process has all."""
    head = model.head.decoder if isinstance(model.head, MaskedLanguageHead) else model.head
    return head if isinstance(head, VocabularyHead) else None


class _PartOfRows:
    """Looks rows of the embedding up, of which a process has some.

    Args:
        first: its first token id.
        real: its rows that are no padding.
        tokens: how tokens are cut between layers; None: every process has all.
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
