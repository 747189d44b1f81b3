"""The mixture p = S r and its gradients by PyTorch's products, by blocks of query rows.

Products are plain ones, and a causal block stops at its last row.

Shapes: B batch, T tokens in a sequence, F width of the features, E experts, M tokens that are
measured, R rows of a block, S keys that a block sees.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.entropy import entropy
from model.smoe.features import Mixing, measured_rows

ROWS_AT_ONCE = 128
"""Query rows of a block. Fewer make narrow products, more leave the cache."""
SHORTEST = 1e-12
"""Features that are shorter are taken to be so long, as by PyTorch's `normalize`."""


def mix(mixing: Mixing) -> tuple[Tensor, Tensor, Tensor]:
    """Mixes.

    Args:
        mixing: What is asked for.

    Returns:
        The mixture [B, T, E], the logarithm of the sum of each row's exponentials [B, T], and the
        effective neighbours [B, M] as `mix_on_host` returns them.
    """
    value_BTE, entropy_BT = mixing.value_BTE, mixing.entropy_BT
    exponents = _Exponents(mixing)
    measured = measured_rows(value_BTE.shape[1], value_BTE.device).tolist()
    mixed_BTE, neighbours = torch.empty_like(value_BTE), []
    log_sum_BT1 = value_BTE.new_empty(*value_BTE.shape[:2], 1)
    for rows, seen in exponents.blocks():
        weights_BRS = exponents.of(rows, seen)
        most_BR1 = weights_BRS.amax(-1, keepdim=True)
        weights_BRS.sub_(most_BR1).exp_()
        sum_BR1 = weights_BRS.sum(-1, keepdim=True)
        torch.div(torch.bmm(weights_BRS, value_BTE[:, seen]), sum_BR1, out=mixed_BTE[:, rows])
        torch.add(most_BR1, sum_BR1.log(), out=log_sum_BT1[:, rows])
        if entropy_BT is None:
            here = [row - rows.start for row in measured if rows.start <= row < rows.stop]
            weights_BRS, sum_BR1 = weights_BRS[:, here], sum_BR1[:, here]
        neighbours.append(entropy(weights_BRS.div_(sum_BR1)).exp_())
    return mixed_BTE, log_sum_BT1.squeeze(-1), torch.cat(neighbours, 1)


def differentiate(
    mixing: Mixing, gradient_BTE: Tensor, mixed_BTE: Tensor, log_sum_BT: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Computes gradients.

    Args:
        mixing: What was asked for.
        gradient_BTE: Of the mixture.
        mixed_BTE: The mixture.
        log_sum_BT: As `mix` returned it.

    Returns:
        The gradients of query, key (None: there is none) and value.
    """
    value_BTE, log_sum_BT1 = mixing.value_BTE, log_sum_BT.unsqueeze(-1)
    exponents = _Exponents(mixing)
    for_value_BTE = torch.zeros_like(value_BTE)
    # sum_j S_ij dS_ij, which the softmax takes off each row, without the row.
    inner_BT1 = (gradient_BTE * mixed_BTE).sum(-1, keepdim=True)
    for rows, seen in exponents.blocks():
        gradient_BRE = gradient_BTE[:, rows]
        weights_BRS = exponents.of(rows, seen).sub_(log_sum_BT1[:, rows]).exp_()
        for_value_BTE[:, seen].baddbmm_(weights_BRS.mT, gradient_BRE)
        change_BRS = torch.bmm(gradient_BRE, value_BTE[:, seen].mT)
        exponents.take_back(change_BRS.sub_(inner_BT1[:, rows]).mul_(weights_BRS), rows, seen)
    return *exponents.gradients(), for_value_BTE


class _Exponents:
    """What S is the softmax of, a block at a time, and the features' gradients.

    Args:
        mixing: What is asked for.
    """

    def __init__(self, mixing: Mixing) -> None:
        query_BTF, key_BTF, self._scale, self._normalized = mixing.features
        self._causal, self._entropy_BT = mixing.causal, mixing.entropy_BT
        self._given, self._one = query_BTF.dtype, key_BTF is None
        dtype = mixing.value_BTE.dtype
        self._query_BTF = query_BTF.to(dtype)
        self._key_BTF = self._query_BTF if key_BTF is None else key_BTF.to(dtype)
        if self._normalized:
            self._over_query_BT1 = _over_length(self._query_BTF)
            self._over_key_BT1 = self._over_query_BT1 if self._one else _over_length(self._key_BTF)
        self._for_query_BTF = torch.empty(0)
        self._for_key_BTF = torch.empty(0)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows that are computed together, and the keys that any of them sees."""
        length = self._query_BTF.shape[1]
        for first in range(0, length, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, length)
            yield slice(first, last), slice(0, last if self._causal else length)

    def of(self, rows: slice, seen: slice) -> Tensor:
        """The exponents [B, R, S] of some rows and keys, -inf where a row does not see."""
        a_BRF, b_BFS = self._query_BTF[:, rows], self._key_BTF[:, seen].mT
        exponents_BRS = a_BRF.new_empty(*a_BRF.shape[:2], b_BFS.shape[2])
        self._multiply(a_BRF, b_BFS, exponents_BRS, beta=0)
        exponents_BRS = self._over_lengths(exponents_BRS, rows, seen)
        if self._causal:  # of the last R keys some rows see a part
            size = exponents_BRS.shape[1]
            unseen_RR = torch.ones(size, size, dtype=torch.bool, device=a_BRF.device).triu_(1)
            exponents_BRS[:, :, -size:].masked_fill_(unseen_RR, -torch.inf)
        if self._entropy_BT is not None:
            more_BRS = self._entropy_BT[:, None, seen] > self._entropy_BT[:, rows, None]
            exponents_BRS.masked_fill_(more_BRS, -torch.inf)
        return exponents_BRS

    def take_back(self, change_BRS: Tensor, rows: slice, seen: slice) -> None:
        """Adds what a block's gradient makes of the features', and overwrites it."""
        if not len(self._for_query_BTF):
            self._for_query_BTF = self._for_key_BTF = torch.zeros_like(self._query_BTF)
            if not self._one:
                self._for_key_BTF = torch.zeros_like(self._key_BTF)
        change_BRS = self._over_lengths(change_BRS, rows, seen)
        self._multiply(change_BRS, self._key_BTF[:, seen], self._for_query_BTF[:, rows], beta=1)
        self._multiply(change_BRS.mT, self._query_BTF[:, rows], self._for_key_BTF[:, seen], beta=1)

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Of query and key, in their precision; if they are one, of both together and None."""
        if self._normalized:
            _take_off_radial(self._for_query_BTF, self._query_BTF, self._over_query_BT1)
            if not self._one:
                _take_off_radial(self._for_key_BTF, self._key_BTF, self._over_key_BT1)
        for_key_BTF = None if self._one else self._for_key_BTF.to(self._given)
        return self._for_query_BTF.to(self._given), for_key_BTF

    def _over_lengths(self, x_BRS: Tensor, rows: slice, seen: slice) -> Tensor:
        """Divides each row and each column by its features' length, in place."""
        if self._normalized:
            x_BRS.mul_(self._over_query_BT1[:, rows]).mul_(self._over_key_BT1[:, seen].mT)
        return x_BRS

    def _multiply(self, a_BPQ: Tensor, b_BQR: Tensor, out_BPR: Tensor, *, beta: float) -> None:
        """out = beta out + scale a b, without a pass over the result for the scale."""
        torch.baddbmm(out_BPR, a_BPQ, b_BQR, beta=beta, alpha=self._scale, out=out_BPR)


def _over_length(x_BTF: Tensor) -> Tensor:
    """One over the length of each token's features, [B, T, 1]."""
    length_BT1: Tensor = torch.linalg.vector_norm(x_BTF, dim=-1, keepdim=True)
    return length_BT1.clamp_min_(SHORTEST).reciprocal_()


def _take_off_radial(change_BTF: Tensor, x_BTF: Tensor, over_BT1: Tensor) -> None:
    """Takes off a gradient what would change the length: its part along the features."""
    along_BT1 = torch.linalg.vecdot(change_BTF, x_BTF).unsqueeze(-1)
    change_BTF.addcmul_(x_BTF, along_BT1.mul_(over_BT1).mul_(over_BT1), value=-1)
