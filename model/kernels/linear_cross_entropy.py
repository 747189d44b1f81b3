"""The loss of a language model from the input of its output head, without all logits in memory.

The reference is cross_entropy(x W^T + b, targets). Here logits exist only for a chunk of tokens at
a time: their loss and the gradients of x, W and b are computed at once in the forward pass, and
scaled in the backward pass. That takes as many products as with all logits, and memory for a chunk
rather than several times N V.

PyTorch 2.13 has such an operation; this one also supports a vocabulary that is split over ranks,
and sums the gradient of W in fp32.

Shapes: N tokens, D width, V vocabulary (of this rank, with padding), C tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear

from polyad.model.kernels import switch
from polyad.model.layers import Region, same

CHUNK = 2**26
"""Maximum number of logits of a chunk: 256 MiB in fp32."""
COMPILED_CHUNK = 2**30
"""The same on a GPU whose compiler keeps them, and their gradients, in bf16 alone: 2 GiB each."""
TILE = 128
"""Rows of a chunk of a GPU are a multiple of this, so that its products have whole tiles."""


class VocabularyPart(NamedTuple):
    """This rank's part of a vocabulary that is split or padded."""

    first: int
    """Its first token id."""
    real: int
    """Number of rows that are not padding."""
    highest: Region = same
    """The elementwise maximum over the ranks."""
    total: Region = same
    """The elementwise sum over the ranks."""

    def without_padding(self, logits_BTV: Tensor) -> Tensor:
        """Removes or masks the logits of padding.

        If several ranks have a part, all keep equally many logits, and those of padding are set to
        the lowest number.
        """
        rows = logits_BTV.shape[-1]
        if self.real == rows:
            return logits_BTV
        if self.total is same:
            return logits_BTV[..., : self.real]
        padding_V = torch.arange(rows, device=logits_BTV.device) >= self.real
        return logits_BTV.masked_fill(padding_V, torch.finfo(logits_BTV.dtype).min)


def by_definition(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, bias_V: Tensor | None = None
) -> Tensor:
    """Reference implementation of `linear_cross_entropy`, over the whole vocabulary."""
    return cross_entropy(linear(x_ND, weight_VD, bias_V).float(), targets_N)


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    part: VocabularyPart | None = None,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Mean negative log-likelihood of the targets, in nats; the softmax runs in fp32.

    Args:
        x_ND: The input of the output head.
        weight_VD: The weight of the output head.
        targets_N: The target token of each position.
        part: This rank's part, if the vocabulary is split. The gradient of x is then that of this
            part, and must be summed over the ranks.
        bias_V: The bias of the output head; None if it has none.

    Returns:
        A scalar in fp32, the same on every rank that has a part.
    """
    if switch.REFERENCE and part is None:
        return by_definition(x_ND, weight_VD, targets_N, bias_V)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_ND, weight_VD, targets_N, part, bias_V
    )
    return loss


@torch.no_grad()
def token_scores(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    part: VocabularyPart | None = None,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the loss of each target [N], and whether no other token has a higher logit [N];
    without gradients."""
    if switch.REFERENCE and part is None:
        logits_NV = linear(x_ND, weight_VD, bias_V).float()
        best_N = logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1) >= logits_NV.amax(1)
        return cross_entropy(logits_NV, targets_N, reduction="none"), best_N
    size = _chunk_size(x_ND, weight_VD)
    pairs = zip(torch.split(x_ND, size), torch.split(targets_N, size), strict=True)
    losses, best, _ = zip(*(_chunk(x, weight_VD, t, part, bias_V) for x, t in pairs), strict=True)
    return torch.cat(losses), torch.cat(best)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        part: VocabularyPart | None,
        bias_V: Tensor | None,
    ) -> Tensor:
        of_x, of_weight, _, _, of_bias = ctx.needs_input_grad
        num_tokens = x_ND.shape[0]
        size = _chunk_size(x_ND, weight_VD)
        grads_CD: list[Tensor] = []
        grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if of_weight else None
        grad_V = weight_VD.new_zeros(weight_VD.shape[0], dtype=torch.float32) if of_bias else None
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        for first in range(0, num_tokens, size):
            x_CD, targets_C = (each[first : first + size] for each in (x_ND, targets_N))
            losses_C, _, grad_CV = _chunk(
                x_CD, weight_VD, targets_C, part, bias_V, grad=of_x or of_weight or of_bias
            )
            total += losses_C.sum()
            if grad_CV is None:
                continue
            grad_CV.div_(num_tokens)
            if grad_V is not None:
                grad_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(x_ND.dtype)
            if of_x:
                grads_CD.append(grad_CV @ weight_VD)
            if grad_VD is not None:
                grad_VD += grad_CV.t() @ x_CD
        kept = None if grad_VD is None else grad_VD.to(weight_VD.dtype)
        of_bias_V = None if grad_V is None or bias_V is None else grad_V.to(bias_V.dtype)
        ctx.save_for_backward(torch.cat(grads_CD) if of_x else None, kept, of_bias_V)
        return total / num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = (
            None if saved is None else saved * gradients[0] for saved in ctx.saved_tensors
        )
        return of_x, of_weight, None, None, of_bias


def _chunk_size(x_ND: Tensor, weight_VD: Tensor) -> int:
    """Returns the number of tokens of a chunk; on a GPU, compiled, all chunks are of one size."""
    rows = weight_VD.shape[0]
    if not switch.compiled_on_gpu(x_ND):
        return max(1, CHUNK // rows)
    most = max(1, COMPILED_CHUNK // (rows * TILE)) * TILE
    chunks = -(-x_ND.shape[0] // most)
    return -(-x_ND.shape[0] // (chunks * TILE)) * TILE


def _chunk(
    x_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    part: VocabularyPart | None,
    bias_V: Tensor | None,
    *,
    grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns what `token_scores` does; with `grad` also the gradient of the losses' sum for the
    logits."""
    is_split, part = part is not None, part or VocabularyPart(0, len(weight_VD))
    logits_CV = linear(x_CD, weight_VD, bias_V).float()
    # Comparisons are part of one compiled kernel. A scatter, or a change of a part, would have all
    # logits, or their gradients in fp32, written before it and read again after it.
    is_compiled = torch.compiler.is_compiling()
    number_V = torch.arange(len(weight_VD), device=logits_CV.device)
    if not is_compiled:
        logits_CV[:, part.real :] = -torch.inf
    elif part.real < len(weight_VD):
        logits_CV = logits_CV.masked_fill(number_V >= part.real, -torch.inf)
    own_C1 = targets_C.unsqueeze(1) - part.first
    has_C1 = (own_C1 >= 0) & (own_C1 < part.real)
    if is_split:  # otherwise no other process has the target: `gather` refuses it
        own_C1 = own_C1.masked_fill(~has_C1, 0)
    logits_CV -= part.highest(logits_CV.amax(1, keepdim=True))
    target_C1 = logits_CV.gather(1, own_C1).masked_fill(~has_C1, 0)
    exp_CV = logits_CV.exp_()
    both_C2 = part.total(torch.cat([exp_CV.sum(1, keepdim=True), target_C1], dim=1))
    sum_C1, target_C1 = both_C2[:, :1], both_C2[:, 1:]
    # The highest logit is 0 after the subtraction; the target's was read before the exponential.
    losses_C, best_C = (sum_C1.log() - target_C1).squeeze(1), (target_C1 >= 0).squeeze(1)
    if not grad:
        return losses_C, best_C, None
    grad_CV = exp_CV.div_(sum_C1)
    if is_compiled:
        return losses_C, best_C, grad_CV - ((number_V == own_C1) & has_C1).float()
    return losses_C, best_C, grad_CV.scatter_add_(1, own_C1, -has_C1.to(grad_CV.dtype))
