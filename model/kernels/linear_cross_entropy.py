"""The loss of a language model from the input of its output head, without whole logits.

By definition cross_entropy(x W^T, targets). Here logits exist for some tokens at a time: of those
the loss and the gradients of x and W are computed at once, in the forward pass, and scaled in the
backward pass. As many products as with whole logits, and memory for CHUNK numbers instead of for
N V of them, several times over.

PyTorch 2.13 has such an operation; this one also runs where each process has a part of the
vocabulary, adds up the gradient of W in fp32, and needs no certain version.

Shapes: N tokens, D width, V vocabulary (of this process, with padding), C tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear

from model.kernels import switch

CHUNK = 2**26
"""Logits of a chunk: 256 MiB in fp32."""


class VocabularyPart(NamedTuple):
    """This process's part of the vocabulary, and how numbers of all parts come together."""

    first: int
    """Its first token id."""
    real: int
    """Rows that are no padding."""
    highest: Callable[[Tensor], Tensor]
    """The elementwise maximum over the processes, in place."""
    total: Callable[[Tensor], Tensor]
    """The elementwise sum over the processes, in place."""


def by_definition(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """As `linear_cross_entropy`, of the whole vocabulary, in plain PyTorch."""
    return cross_entropy(linear(x_ND, weight_VD).float(), targets_N)


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, part: VocabularyPart | None = None
) -> Tensor:
    """Mean negative log-likelihood of the targets, in nats; the softmax runs in fp32.

    Args:
        x_ND: What the output head reads.
        weight_VD: The output head.
        targets_N: The right token of each position.
        part: Where each process has a part of the vocabulary: this one's. The gradient of x is
            then that of this part, and has to be summed over the processes.

    Returns:
        A scalar in fp32, the same on every process that has a part.
    """
    if switch.REFERENCE and part is None:
        return by_definition(x_ND, weight_VD, targets_N)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_ND, weight_VD, targets_N, part
    )
    return loss


@torch.no_grad()
def token_losses(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, part: VocabularyPart | None = None
) -> Tensor:
    """As `linear_cross_entropy`, of each token and without gradients: [N] in fp32."""
    if switch.REFERENCE and part is None:
        return cross_entropy(linear(x_ND, weight_VD).float(), targets_N, reduction="none")
    size = max(1, CHUNK // weight_VD.shape[0])
    pairs = zip(torch.split(x_ND, size), torch.split(targets_N, size), strict=True)
    return torch.cat([_chunk(x, weight_VD, targets, part, False)[0] for x, targets in pairs])


def losses(
    x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, part: VocabularyPart | None = None
) -> Tensor:
    """What an output head returns that is given targets: their mean loss; in evaluation, where no
    gradient is wanted, the loss of each [B, T]."""
    arguments = x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), part
    if torch.is_grad_enabled():
        return linear_cross_entropy(*arguments)
    return token_losses(*arguments).view_as(targets_BT)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, part: VocabularyPart | None
    ) -> Tensor:
        of_x, of_weight, *_ = ctx.needs_input_grad
        num_tokens = x_ND.shape[0]
        size = max(1, CHUNK // weight_VD.shape[0])
        grads_CD: list[Tensor] = []
        grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if of_weight else None
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        for first in range(0, num_tokens, size):
            x_CD, targets_C = (each[first : first + size] for each in (x_ND, targets_N))
            losses_C, grad_CV = _chunk(x_CD, weight_VD, targets_C, part, of_x or of_weight)
            total += losses_C.sum()
            if grad_CV is None:
                continue
            grad_CV = grad_CV.div_(num_tokens).to(x_ND.dtype)
            if of_x:
                grads_CD.append(grad_CV @ weight_VD)
            if grad_VD is not None:
                grad_VD += grad_CV.t() @ x_CD
        kept = None if grad_VD is None else grad_VD.to(weight_VD.dtype)
        ctx.save_for_backward(torch.cat(grads_CD) if of_x else None, kept)
        return total / num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x_ND, grad_VD = ctx.saved_tensors
        of_x, of_weight = (None if g is None else g * gradients[0] for g in (grad_x_ND, grad_VD))
        return of_x, of_weight, None, None


def _chunk(
    x_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, part: VocabularyPart | None, grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of each token, and with `grad` the gradient of their sum for the logits."""
    logits_CV = linear(x_CD, weight_VD).float()
    own_C1 = targets_C.unsqueeze(1)
    has_C1 = None
    if part is not None:
        logits_CV[:, part.real :] = -torch.inf
        own_C1 = own_C1 - part.first
        has_C1 = (own_C1 >= 0) & (own_C1 < part.real)
        own_C1 = own_C1.masked_fill(~has_C1, 0)
    highest_C1 = logits_CV.amax(1, keepdim=True)
    if part is not None:
        highest_C1 = part.highest(highest_C1)
    logits_CV -= highest_C1
    target_C1 = logits_CV.gather(1, own_C1)
    exp_CV = logits_CV.exp_()
    sum_C1 = exp_CV.sum(1, keepdim=True)
    if part is not None:
        assert has_C1 is not None
        target_C1 = target_C1.masked_fill(~has_C1, 0)
        both_C2 = part.total(torch.cat([sum_C1, target_C1], dim=1))
        sum_C1, target_C1 = both_C2[:, :1], both_C2[:, 1:]
    losses_C = (sum_C1.log() - target_C1).squeeze(1)
    if not grad:
        return losses_C, None
    grad_CV = exp_CV.div_(sum_C1)
    ones_C1 = torch.ones_like(target_C1) if has_C1 is None else has_C1.to(grad_CV.dtype)
    return losses_C, grad_CV.scatter_add_(1, own_C1, -ones_C1)
