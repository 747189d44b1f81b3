"""Losses: small pure functions of what a model returns.

Shapes: B batch, T tokens in a sequence, V vocabulary.
"""

from torch import Tensor
from torch.nn.functional import cross_entropy


def token_losses(logits_BTV: Tensor, target_ids_BT: Tensor) -> Tensor:
    """Negative log-likelihood of every target, in nats.

    Args:
        logits_BTV: of any precision; the softmax runs in fp32.
        target_ids_BT: the token that follows each position.

    Returns:
        [B, T] in fp32.
    """
    flat = cross_entropy(
        logits_BTV.flatten(0, 1).float(), target_ids_BT.flatten(), reduction="none"
    )
    return flat.view_as(target_ids_BT)


def split_samples(tokens_BT1: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of samples of T + 1 tokens: each position is to predict its successor."""
    return tokens_BT1[:, :-1].contiguous(), tokens_BT1[:, 1:].contiguous()
