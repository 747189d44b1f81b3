"""Routing losses: pure functions of scores and selected experts.

The z-loss and the orthogonality loss are means over tokens, the sequence loss is a mean over
sequences, and the coupling loss depends only on weights. The others multiply or divide means over
tokens, so they are not linear in the batch: the loss of a step is the mean over its micro-batches
(`train/loop/losses.py`).

Shapes: N tokens, B sequences, E experts, K experts of a token, D width.
"""

import math

import torch
from torch import Tensor

NO_OUTPUT = 1e-12
"""Bound of the squared lengths of experts' outputs in denominators."""


def load_balance_loss(mean_scores_E: Tensor, load_E: Tensor) -> Tensor:
    """E * sum_e f_e P_e: 1 at uniform load, for any K (Fedus et al. 2022, equation 4).

    Args:
        mean_scores_E: P, the mean over tokens of the scores before top-K.
        load_E: f, the share of the assignments of each expert; no gradient flows to it.

    Returns:
        A scalar. Not linear in the batch: it refers to one micro-batch of one rank.
    """
    return mean_scores_E.shape[0] * (load_E.detach() * mean_scores_E).sum()


def sequence_balance_loss(chosen_BE: Tensor, scores_BE: Tensor, top_k: int) -> Tensor:
    """The mean over sequences of sum_e f_e P_e: 1 at uniform load, for any K.

    f_e is E / K times the share of the sequence's tokens that have expert e among their K best, and
    P_e its mean score. Source: DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20.

    Args:
        chosen_BE: This share, by each token's own scores; no gradient flows to it.
        scores_BE: P, the mean over each sequence's tokens of scores that sum to 1.
        top_k: K.

    Returns:
        A scalar. A mean over sequences, so it does not depend on the micro-batches.
    """
    f_BE = chosen_BE.detach() * (chosen_BE.shape[1] / top_k)
    return (f_BE * scores_BE).sum(1).mean()


def router_z_loss(logits_NE: Tensor) -> Tensor:
    """The mean of logsumexp(logits)^2 (Zoph et al. 2022, equation 5), which keeps logits small.

    Args:
        logits_NE: Logits of the base score.

    Returns:
        A scalar.
    """
    return logits_NE.logsumexp(-1).square().mean()


def importance_loss(mean_scores_E: Tensor) -> Tensor:
    """The squared coefficient of variation, over experts, of the scores' sum over tokens.

    0 if all experts have the same sum. Source: Riquelme et al. 2021, appendix A.2.

    Args:
        mean_scores_E: The mean over tokens of the base score without noise; it sums to 1, so that
            the mean over experts is 1 / E.

    Returns:
        A scalar. Not linear in the batch: it refers to one micro-batch of one rank.
    """
    num_experts = mean_scores_E.shape[0]
    squared_variation: Tensor = mean_scores_E.var(correction=0) * num_experts**2
    return squared_variation


def load_loss(logits_NE: Tensor, noisy_NE: Tensor, noise_std: float, top_k: int) -> Tensor:
    """The squared coefficient of variation, over experts, of the expected load under noise.

    The load of an expert is the mean over tokens of the probability that its logit, with fresh
    noise, exceeds the lowest logit that the token selected. Source: Shazeer et al. 2017, appendix
    A; Riquelme et al. 2021, appendix A.2, whose code compares with the K-th highest of all experts.

    Args:
        logits_NE: Logits of the base score.
        noisy_NE: The logits with noise.
        noise_std: Standard deviation of the noise, above 0.
        top_k: K, the experts of a token.

    Returns:
        A scalar. Not linear in the batch: it refers to one micro-batch of one rank.
    """
    last_N1 = noisy_NE.topk(top_k, dim=-1).values[:, -1:]
    deviations_NE = (last_N1 - logits_NE) / noise_std
    chance_NE = 0.5 * torch.special.erfc(deviations_NE / math.sqrt(2))
    return _squared_variation(chance_NE.mean(0))


def coupling_loss(norms_EE: Tensor, alpha: float) -> Tensor:
    """How much a router's rows activate experts other than their own, and experts other rows:

        1 / E^2 sum_{i != j} max(M_ij - alpha M_ii, 0) + max(M_ji - alpha M_ii, 0)

    Source: "Coupling experts and routers in mixture-of-experts via an auxiliary loss", 2025, arXiv
    2512.23447 (ERC loss).

    Args:
        norms_EE: M, the norm of the first layer of expert j applied to the row of expert i.
        alpha: The coupling, relative to an expert's own norm, that is not penalized.

    Returns:
        A scalar.
    """
    own_E = alpha * norms_EE.diagonal()
    above_EE = (norms_EE - own_E[:, None]).clamp_min(0) + (norms_EE - own_E).clamp_min(0)
    total: Tensor = above_EE.fill_diagonal_(0).sum() / norms_EE.numel()
    return total


def moved_rows(rows_ED: Tensor) -> Tensor:
    """Perturbs a router's rows: multiplies entries by random numbers from 1 - eps_i to 1 + eps_i.

    eps_i is half the distance to the nearest other row, relative to the row's length, so that a row
    stays nearest to itself. It is treated as constant in the gradient.

    Args:
        rows_ED: The rows.

    Returns:
        [E, D]; the random numbers come from the default generator.
    """
    with torch.no_grad():
        far_EE = torch.cdist(rows_ED, rows_ED, compute_mode="donot_use_mm_for_euclid_dist")
        nearest_E = far_EE.fill_diagonal_(torch.inf).amin(1)
        tiny = torch.finfo(rows_ED.dtype).tiny
        eps_E = nearest_E / (2 * rows_ED.norm(dim=1)).clamp_min(tiny)
        factors_ED: Tensor = 1 + eps_E[:, None] * (2 * torch.rand_like(rows_ED) - 1)
    return rows_ED * factors_ED


def orthogonality_loss(outputs_NKD: Tensor) -> Tensor:
    """The mean over tokens of the squared lengths of the projections of a token's outputs x:

        sum_{j != k} |<x_j, x_k> / <x_k, x_k> x_k|^2

    0 if they are orthogonal. Source: "Advancing expert specialization for better MoE", 2025, arXiv
    2505.22323, equation 5, which sums over tokens: with the mean, the coefficient does not depend
    on their number.

    Args:
        outputs_NKD: The outputs of each token's experts, before its weights.

    Returns:
        A scalar.
    """
    gram_NKK = outputs_NKD @ outputs_NKD.transpose(1, 2)
    # Not via the diagonal: torch 2.13's Inductor computes its gradient wrongly on a CPU.
    square_NK = outputs_NKD.square().sum(2)
    # An output of 0 has no direction: the bound turns 0 / 0 into 0.
    share_NK = square_NK / (square_NK + NO_OUTPUT).square()
    projected_NKK = gram_NKK.square() * share_NK[:, None, :]
    others_KK = 1 - torch.eye(gram_NKK.shape[1], dtype=gram_NKK.dtype, device=gram_NKK.device)
    of_tokens_N: Tensor = (projected_NKK * others_KK).sum((1, 2))
    return of_tokens_N.mean()


def variance_loss(weights_NE: Tensor) -> Tensor:
    """Minus the variance over tokens of each expert's weight, summed over experts.

    It is lower the more decisive routing is, even if all tokens prefer the same experts, so it has
    to be combined with a balance loss. Source: see `orthogonality_loss`, equations 6 and 7, with
    their n as the number of tokens, so that the loss does not depend on it.

    Args:
        weights_NE: The weights of all experts' outputs, 0 for those not selected.

    Returns:
        A scalar. Not linear in the batch: it refers to one micro-batch of one rank.
    """
    spread_E: Tensor = weights_NE.var(0, correction=0)
    return -spread_E.sum()


def _squared_variation(values_E: Tensor) -> Tensor:
    """Returns variance over squared mean; 0 if all values are equal."""
    return values_E.var(correction=0) / values_E.mean().square()
