"""The loss of a language model from the input of its output head, without whole logits.

By definition cross_entropy(x W^T + b, targets). Here logits exist for some tokens at a time: of
those the loss and the gradients of x, W and b are computed at once, in the forward pass, and scaled
in the backward pass. As many products as with whole logits, and memory for CHUNK numbers instead of
for N V of them, several times over.

PyTorch 2.13 has such an operation; this one also runs where each process has a part of the
vocabulary, adds up the gradient of W in fp32, and needs no certain version.

Shapes: N tokens, D width, V vocabulary (of this process, with padding), C tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear

from polyad.model.kernels import switch
from polyad.model.regions import Region, same

CHUNK = 2**26
"""Logits of a chunk: 256 MiB in fp32."""


class VocabularyPart(NamedTuple):
    """This process's part of a vocabulary that is cut or padded."""

    first: int
    """Its first token id."""
    real: int
    """Rows that are no padding."""
    highest: Region = same
    """The elementwise maximum over the processes, in place."""
    total: Region = same
    """The elementwise sum over the processes, in place."""

    def without_padding(self, logits_BTV: Tensor) -> Tensor:
        """Logits without those of padding.

        Where several processes have a part, all keep as many logits: the lowest number is then in
        the place of padding.
        """
        rows = logits_BTV.shape[-1]
        if self.real == rows:
            return logits_BTV
        if self.total is same:
            return logits_BTV[..., : self.real]
        padding_V = torch.arange(rows, device=logits_BTV.device) >= self.real
        return logits_BTV.masked_fill(padding_V, torch.finfo(logits_BTV.dtype).min)


class TokenScores(NamedTuple):
    """What a model says of each target."""

    losses_N: Tensor
    """Negative log-likelihood, in nats, fp32."""
    best_N: Tensor
    """Whether no other token has a higher logit."""


def by_definition(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, bias_V: Tensor | None = None
) -> Tensor:
    """Computes `linear_cross_entropy` over the whole vocabulary in plain PyTorch."""
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
        x_ND: What the output head reads.
        weight_VD: The output head.
        targets_N: The right token of each position.
        part: Where each process has a part of the vocabulary: this one's. The gradient of x is
            then that of this part, and has to be summed over the processes.
        bias_V: The bias of the output head; None: it has none.

    Returns:
        A scalar in fp32, the same on every process that has a part.
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
) -> TokenScores:
    """The loss of each target, and whether the model would say it; without gradients."""
    if switch.REFERENCE and part is None:
        logits_NV = linear(x_ND, weight_VD, bias_V).float()
        best_N = logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1) >= logits_NV.amax(1)
        return TokenScores(cross_entropy(logits_NV, targets_N, reduction="none"), best_N)
    size = max(1, CHUNK // weight_VD.shape[0])
    pairs = zip(torch.split(x_ND, size), torch.split(targets_N, size), strict=True)
    chunks = [_chunk(x, weight_VD, targets, part, bias_V)[0] for x, targets in pairs]
    return TokenScores(*map(torch.cat, zip(*chunks, strict=True)))


def token_losses(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    part: VocabularyPart | None = None,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Returns `linear_cross_entropy` of each token, [N] in fp32, without gradients."""
    return token_scores(x_ND, weight_VD, targets_N, part, bias_V).losses_N


def losses(
    x_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    part: VocabularyPart | None = None,
    bias_V: Tensor | None = None,
) -> Tensor:
    """What an output head returns that is given targets: their mean loss; in evaluation, where no
    gradient is wanted, the loss of each [B, T]."""
    arguments = x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), part, bias_V
    if torch.is_grad_enabled():
        return linear_cross_entropy(*arguments)
    return token_losses(*arguments).view_as(targets_BT)


def scores(
    x_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    part: VocabularyPart | None = None,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Returns `losses`; without gradients [B, T, 2], with a 1 where the target scores best."""
    arguments = x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), part, bias_V
    if torch.is_grad_enabled():
        return linear_cross_entropy(*arguments)
    both = token_scores(*arguments)
    stacked_N2 = torch.stack([both.losses_N, both.best_N.to(both.losses_N.dtype)], dim=-1)
    return stacked_N2.view(*targets_BT.shape, 2)


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
        size = max(1, CHUNK // weight_VD.shape[0])
        grads_CD: list[Tensor] = []
        grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if of_weight else None
        grad_V = weight_VD.new_zeros(weight_VD.shape[0], dtype=torch.float32) if of_bias else None
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        for first in range(0, num_tokens, size):
            x_CD, targets_C = (each[first : first + size] for each in (x_ND, targets_N))
            scores, grad_CV = _chunk(
                x_CD, weight_VD, targets_C, part, bias_V, grad=of_x or of_weight or of_bias
            )
            total += scores.losses_N.sum()
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


def _chunk(
    x_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    part: VocabularyPart | None,
    bias_V: Tensor | None,
    *,
    grad: bool = False,
) -> tuple[TokenScores, Tensor | None]:
    """The score of each token, and with `grad` the gradient of the losses' sum for the logits."""
    logits_CV = linear(x_CD, weight_VD, bias_V).float()
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
    # The highest logit is 0 after the subtraction; the target's was read before the exponential.
    scores = TokenScores((sum_C1.log() - target_C1).squeeze(1), (target_C1 >= 0).squeeze(1))
    if not grad:
        return scores, None
    grad_CV = exp_CV.div_(sum_C1)
    ones_C1 = torch.ones_like(target_C1) if has_C1 is None else has_C1.to(grad_CV.dtype)
    return scores, grad_CV.scatter_add_(1, own_C1, -ones_C1)
