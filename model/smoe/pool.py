"""Pools: restrict the experts that the tokens of a document may use in training (EMO).

    D = the d experts with the highest mean p over the document     d ~ U{least, ..., most}
    q = p on D, divided by its sum

Top-K then uses q instead of p. d is drawn for each document and layer; D has no gradient, q has
that of p. With `prefix` the mean is over the document's tokens up to and including this one, so
that D does not depend on later tokens. There is no pool in evaluation.

Source: "EMO: Pretraining mixture of experts for emergent modularity" (2605.06663).

Shapes: B batch, T tokens in a sequence, N real tokens, E experts, M maximum experts of a pool.
"""

import torch
from torch import Tensor, nn

from polyad.model.layers import Region, same
from polyad.model.smoe.config import SparseMoEConfig

LEAST_SCORE = 1e-20
"""Minimum score of an expert in a pool before normalization: softmax may round scores to 0, and
top-K would then select experts outside the pool."""


class Pool(nn.Module):
    """The pools of one layer.

    Args:
        config: The layer's configuration, whose `pool` is not `none`.
    """

    def __init__(self, config: SparseMoEConfig) -> None:
        super().__init__()
        self.is_causal = config.pool == "prefix"
        self.least, self.most = config.pool_bounds()
        self.agreed: Region = same
        """Makes ranks with the same tokens agree; see `Selection.agreed`."""

    @torch.no_grad()
    def forward(self, scores_BTE: Tensor, first_BT: Tensor | None = None) -> Tensor:
        """Finds the experts that each token may use.

        Args:
            scores_BTE: p, each row summing to 1; 0 for padding.
            first_BT: See `document_starts`; None if each sequence is one document.

        Returns:
            [B, T, E], True for the d experts of the token's pool.
        """
        batch, length, _ = scores_BTE.shape
        position_T = torch.arange(length, device=scores_BTE.device)
        if first_BT is None:
            first_BT = torch.zeros_like(position_T).expand(batch, -1)
        last_BT = (position_T if self.is_causal else position_T[-1]).expand(batch, length)
        # Sums rank experts like means do. Each is the difference of two running sums, which in fp32
        # would lose the contribution of a short document late in a long sequence.
        sums_BTE = nn.functional.pad(scores_BTE.double().cumsum(1), (0, 0, 1, 0))
        mean_BTE = _rows(sums_BTE, last_BT + 1) - _rows(sums_BTE, first_BT)
        best_BTM = mean_BTE.topk(self.most, dim=-1).indices
        kept_BTM = torch.arange(self.most, device=first_BT.device) < self._sizes(first_BT)
        pool_BTE = torch.zeros_like(scores_BTE, dtype=torch.bool)
        return self.agreed(pool_BTE.scatter(-1, best_BTM, kept_BTM.expand_as(best_BTM)))

    def _sizes(self, first_BT: Tensor) -> Tensor:
        """Returns d of each token's document [B, T, 1]: the number drawn at its first token.

        Drawn from the default generator: every tensor-parallel rank draws the same numbers, and
        recomputation draws them again.
        """
        if self.least == self.most:
            return first_BT.new_full((1, 1, 1), self.most)
        drawn_BT = torch.randint_like(first_BT, self.least, self.most + 1)
        return drawn_BT.gather(1, first_BT).unsqueeze(-1)


def document_starts(ids_BT: Tensor, end_id: int) -> Tensor:
    """Finds the position in its sequence of the first token of each token's document, [B, T].

    Prepared text is cut into sequences at arbitrary places, so a sequence may hold several
    documents and parts of two more. Parts of a document in other sequences do not count.

    Args:
        ids_BT: Token ids.
        end_id: The token that ends each document and belongs to it.
    """
    position_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    after_BT = torch.where(ids_BT == end_id, position_T + 1, 0).cummax(1).values
    return torch.cat([torch.zeros_like(after_BT[:, :1]), after_BT[:, :-1]], 1)


def _rows(x_BTE: Tensor, position_BT: Tensor) -> Tensor:
    """Selects the rows at some positions of each sequence."""
    return x_BTE.gather(1, position_BT.unsqueeze(-1).expand(-1, -1, x_BTE.shape[-1]))


def within(p_NE: Tensor, pool_NE: Tensor) -> Tensor:
    """Computes q: scores within pools, each row summing to 1.

    Args:
        p_NE: Scores of all experts.
        pool_NE: True for the experts of a token's pool.

    Returns:
        [N, E], above 0 in the pool and 0 outside it.
    """
    kept_NE = torch.where(pool_NE, p_NE.clamp_min(LEAST_SCORE), 0)
    return kept_NE / kept_NE.sum(-1, keepdim=True)
