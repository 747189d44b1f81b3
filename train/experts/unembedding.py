"""Direct logit attribution: which tokens an expert's mean output promotes.

With v the mean output, gamma the final norm's scale and W the rows of the head:

    direct effect on logits = W (gamma * (v - mean v)) / s    (RMSNorm: v in place of v - mean v)

s, the deviation of the residual stream, differs between tokens but multiplies all logits alike, so
effects are given in standard deviations over the vocabulary, which do not depend on s. Effects
through later blocks are ignored, so results are most reliable in the last blocks.

Shapes: S experts, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.decoder import Decoder
from polyad.model.heads import UntiedHead


class Raised(NamedTuple):
    """A token that an expert promotes."""

    token: int
    text: str
    effect: float
    """Effect on its logit, in standard deviations above the mean over the vocabulary."""


@torch.inference_mode()
def raised_tokens(
    model: Decoder, mean_SD: Tensor, count: int, text_of: Callable[[int], str]
) -> list[list[Raised]]:
    """Returns the tokens whose logits each expert's mean output raises most.

    Args:
        model: a language model, whole on this process.
        mean_SD: mean outputs; 0 for unused experts.
        count: number of tokens.
        text_of: the text of a token.

    Returns:
        Tokens for each expert, the highest first; none for unused experts.
    """
    norm, head = model.final_norm, model.head
    weight_VD = head.weight if isinstance(head, UntiedHead) else model.token_embedding.weight
    direction_SD = mean_SD.to(weight_VD.device, torch.float32)
    if isinstance(norm, nn.LayerNorm):
        direction_SD = direction_SD - direction_SD.mean(-1, keepdim=True)
    assert isinstance(norm.weight, Tensor)
    effect_SV = (direction_SD * norm.weight.float()) @ weight_VD.float().T
    spread_S1 = effect_SV.std(-1, keepdim=True)
    effect_SV = (effect_SV - effect_SV.mean(-1, keepdim=True)) / spread_S1
    found = []
    for used, effect_V in zip((spread_S1[:, 0] > 0).tolist(), effect_SV, strict=True):
        best, tokens = effect_V.topk(min(count, len(effect_V)))
        pairs = zip(tokens.tolist(), best.tolist(), strict=True)
        raised = [Raised(token, text_of(token), effect) for token, effect in pairs]
        found.append(raised if used else [])
    return found
