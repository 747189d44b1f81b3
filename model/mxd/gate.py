"""The sparse gate: selects a few of very many experts per token, with unnormalized weights.

    a = TopK(relu(G u + g))

With several levels the score of expert (n_1, ..., n_L) is the sum of one score per level: product
keys (Lample et al. 2019, "Large memory layers with product keys"), with linear scores of the whole
input. Scoring N experts then costs about as much as L N^(1/L), and the K best of all N are found
exactly.

Shapes: M tokens, D width, N experts of a level, S scores of all levels side by side, K experts of a
token.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.initialization import Initializer, uniform
from polyad.model.layers import Region, same
from polyad.model.smoe.selection import Selected, count


def best_sums(levels: Sequence[Tensor], top_k: int) -> Tensor:
    """Finds the K highest sums of one score per level, without computing all sums.

    For two lists in descending order, i j sums are at least as high as that of entries i and j
    (from 1), so pairs with i j > K are never needed.

    Args:
        levels: The scores of each level, [M, N].
        top_k: K, at most the product of all N.

    Returns:
        Expert indices [M, K], int64, the highest sum first; the last level varies fastest.
    """
    values_MI, ids_MI = levels[0].topk(min(top_k, levels[0].shape[1]), dim=1)
    for level_MN in levels[1:]:
        number = level_MN.shape[1]
        more_MJ, more_ids_MJ = level_MN.topk(min(top_k, number), dim=1)
        i_P, j_P = _pairs(values_MI.shape[1], more_MJ.shape[1], top_k, level_MN.device)
        sums_MP = values_MI[:, i_P] + more_MJ[:, j_P]
        values_MI, best_MI = sums_MP.topk(min(top_k, len(i_P)), dim=1)
        ids_MI = ids_MI.gather(1, i_P[best_MI]) * number + more_ids_MJ.gather(1, j_P[best_MI])
    return ids_MI


def _pairs(first: int, second: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lists pairs of positions in two sorted lists whose sum can be among the K highest."""
    number = sum(min(second, top_k // place) for place in range(1, first + 1))
    place_I = torch.arange(first, device=device)
    partners_I = (top_k // (place_I + 1)).clamp_max(second)
    # With the output size given, the CPU does not have to wait for the device.
    i_P = place_I.repeat_interleave(partners_I, output_size=number)
    first_I = partners_I.cumsum(0) - partners_I
    return i_P, torch.arange(number, device=device) - first_I[i_P]


class SparseGate(nn.Module):
    """Linear scores, of which the K highest are kept if they are above 0.

    Source: Oldfield et al. 2025, who also use PyTorch's initialization of linear layers.

    Args:
        num_experts: N of each level.
        width: D.
        top_k: K.
    """

    def __init__(self, num_experts: Sequence[int], width: int, top_k: int) -> None:
        super().__init__()
        self.levels, self.top_k = list(num_experts), top_k
        self.num_experts = math.prod(num_experts)
        self.weight = nn.Parameter(torch.empty(sum(num_experts), width))
        self.bias = nn.Parameter(torch.empty(sum(num_experts)))
        self.bound = width**-0.5
        self.agreed: Region = same
        """Makes ranks with the same tokens agree; see `Selection.agreed`."""

    def initializers(self) -> dict[str, Initializer]:
        """Returns PyTorch's uniform initializer of linear layers."""
        return {"weight": uniform(self.bound), "bias": uniform(self.bound)}

    def forward(self, u_MD: Tensor) -> Selected:
        """Selects and weights the experts of every token.

        Args:
            u_MD: The gate's input.

        Returns:
            Weights of K experts, at least fp32, with a gradient if above 0. Experts of weight 0 are
            not counted.
        """
        scores_MS = linear(u_MD, self.weight, self.bias)
        scores_MS = scores_MS.to(torch.promote_types(scores_MS.dtype, torch.float32))
        scores_MK, ids_MK = self.best(scores_MS)
        weights_MK = scores_MK.relu()
        # One more bin for slots without an expert.
        used_MK = torch.where(weights_MK > 0, ids_MK, self.num_experts)
        return Selected(weights_MK, ids_MK, count(used_MK, self.num_experts + 1)[:-1])

    def best(self, scores_MS: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the K highest scores [M, K], and the indices of their experts.

        Args:
            scores_MS: The scores of all levels side by side.
        """
        levels = scores_MS.split_with_sizes(self.levels, dim=1)
        with torch.no_grad():
            ids_MK = self.agreed(best_sums(levels, self.top_k))
        scores_MK, rest_MK = torch.zeros((), dtype=scores_MS.dtype), ids_MK
        for level_MN in reversed(levels):
            number = level_MN.shape[1]
            scores_MK = scores_MK + level_MN.gather(1, rest_MK % number)
            rest_MK = rest_MK // number
        return scores_MK, ids_MK
