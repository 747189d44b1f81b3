"""The cross-entropy loss, for the next token or for the class of an image.

Shapes: V classes, for example the tokens of a vocabulary.
"""

from torch import Tensor
from torch.nn import functional


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of every target, in nats.

    Args:
        logits: [..., V] of any precision; the softmax runs in fp32.
        targets: [...], the right class of each position.

    Returns:
        [...] in fp32.
    """
    flat = functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), reduction="none"
    )
    return flat.view_as(targets)
