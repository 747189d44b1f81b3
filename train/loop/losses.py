"""Auxiliary losses of routed layers, which are added to the loss of a task."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from model.config import Config
from model.output import RoutingStats
from train.loop.sample_similarity import SampleSimilarityConfig


class LossConfig(Config):
    """What is added to the mean loss of a task, for every layer that routes."""

    load_balance: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the load-balance loss E sum_e f_e P_e (Switch: 0.01); 0 leaves it out."""
    router_z: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the router z-loss, the mean squared logsumexp of its logits (ST-MoE: 0.001);
    0 leaves it out."""
    importance: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the importance loss: how unevenly the scores of a micro-batch are spread over
    experts (V-MoE: 0.005); 0 leaves it out."""
    importance_form: Literal["squared", "plain"] = "squared"
    """`squared`: the squared coefficient of variation of the scores' sums (V-MoE); `plain`: the
    coefficient itself (Krishnamurthy et al. 2023)."""
    load: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the load loss, the same of the load to be expected under the router's noise,
    which it needs (V-MoE: 0.005); 0 leaves it out."""
    sample_similarity: SampleSimilarityConfig | None = None
    """The loss that sends similar samples to the same expert and different ones to others; null
    leaves it out."""


def routing_loss(routing: tuple[RoutingStats, ...], config: LossConfig) -> Tensor | None:
    """The losses of all routed layers, weighted and added up.

    Args:
        routing: as the model returned it.
        config: the coefficients.

    Returns:
        A scalar; None where nothing is to be added.
    """
    terms = [
        coefficient * value
        for stats in routing
        for coefficient, value in (
            (config.load_balance, stats.balance_loss),
            (config.router_z, stats.z_loss),
            (config.importance, _importance(stats.importance_loss, config)),
            (config.load, stats.load_loss),
            (1.0, stats.similarity_loss),
        )
        if coefficient and value is not None
    ]
    return torch.stack(terms).sum() if terms else None


def _importance(squared: Tensor | None, config: LossConfig) -> Tensor | None:
    """The importance loss in its form; at 0, where a root has no gradient, it gets none."""
    if squared is None or config.importance_form == "squared":
        return squared
    root = squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()
    return torch.where(squared > 0, root, 0)
