"""Losses: small pure functions of what a model returns.

Shapes: B batch, T tokens in a sequence, V vocabulary.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from model.config import Config
from model.output import RoutingStats


class LossConfig(Config):
    """What is added to the mean negative log-likelihood of a token, for every layer that routes."""

    load_balance: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the load-balance loss E sum_e f_e P_e (Switch: 0.01); 0 leaves it out."""
    router_z: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the router z-loss, the mean squared logsumexp of its logits (ST-MoE: 0.001);
    0 leaves it out."""


def routing_loss(routing: tuple[RoutingStats, ...], config: LossConfig) -> Tensor | None:
    """The losses of all routed layers, weighted and added up.

    Args:
        routing: as the model returned it.
        config: the coefficients.

    Returns:
        No dimensions; None where nothing is to be added.
    """
    terms = [
        coefficient * value
        for stats in routing
        for coefficient, value in (
            (config.load_balance, stats.balance_loss),
            (config.router_z, stats.z_loss),
        )
        if coefficient and value is not None
    ]
    return torch.stack(terms).sum() if terms else None


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
