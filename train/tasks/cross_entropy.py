"""The loss of a classification: of the next token, of an image.

Shapes: V classes, as the tokens of a vocabulary.
"""

from torch import Tensor
from torch.nn import functional


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of every target, in nats.

    Args:
        logits: [..., V] of any precision; the softmax runs in fp32.
        targets: [...], the class of each.

    Returns:
        [...] in fp32.
    """
    flat = functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), reduction="none"
    )
    return flat.view_as(targets)
