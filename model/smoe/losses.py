"""Routing losses: pure functions of scores and selected experts.

The z-loss is a mean over tokens and the sequence loss a mean over sequences. The others multiply or
divide means over tokens, so they are not linear in the batch: the loss of a step is the mean over
its micro-batches (`train/loop/losses.py`).

Shapes: N tokens, B sequences, E experts, K experts of a token.
"""

import math

import torch
from torch import Tensor


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
    load_E = chance_NE.mean(0)
    squared_variation: Tensor = load_E.var(correction=0) / load_E.mean().square()
    return squared_variation
