"""Auxiliary losses of routed layers, which are added to the loss of a task."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyad.model.config import Config
from polyad.model.output import RoutingStats
from polyad.train.loop.sample_similarity import SampleSimilarityConfig


class LossConfig(Config):
    """What is added to the mean loss of a task, for every layer that routes.

    Each is a number of one micro-batch of one process. The z-loss is a mean over its tokens, so a
    step's is that of all its tokens, however they are cut into micro-batches. Load balance,
    importance and load multiply or divide means over tokens, and sample similarity compares pairs:
    those of a step are means over its micro-batches, and change with `train.micro_batch_size`.
    """

    load_balance: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the load-balance loss E sum_e f_e P_e of a micro-batch (Switch: 0.01); 0
    leaves it out."""
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
    which it needs, in a micro-batch (V-MoE: 0.005); 0 leaves it out."""
    sample_similarity: SampleSimilarityConfig | None = None
    """The loss that sends similar samples of a micro-batch to the same expert and different ones to
    others; null leaves it out."""

    def coefficients(self) -> dict[str, float]:
        """The coefficients of losses of tokens, and not of whole samples, by their names in
        `RoutingStats`; those that are not 0."""
        known = {
            "balance_loss": self.load_balance,
            "z_loss": self.router_z,
            "importance_loss": self.importance,
            "load_loss": self.load,
        }
        return {name: coefficient for name, coefficient in known.items() if coefficient}


def routing_loss(
    routing: tuple[RoutingStats, ...], config: LossConfig, mean_tokens: Tensor | None = None
) -> Tensor | None:
    """The losses of all routed layers, weighted and added up.

    A step's loss is the mean over its micro-batches. Where padding leaves some of these more tokens
    than others, what is of tokens is multiplied by the micro-batch's tokens over their mean, so
    that the step's mean is over tokens.

    Args:
        routing: as the model returned it.
        config: the coefficients.
        mean_tokens: of all micro-batches of the step, on all processes; None where all have as
            many, and `RoutingStats.tokens` is None.

    Returns:
        A scalar; None where nothing is to be added.
    """
    terms = []
    for stats in routing:
        known = stats._replace(importance_loss=_importance(stats.importance_loss, config))
        of_tokens = [
            coefficient * value
            for name, coefficient in config.coefficients().items()
            if (value := getattr(known, name)) is not None
        ]
        if of_tokens and stats.tokens is not None:
            if mean_tokens is None:
                raise TypeError("a batch with padding has to say its `real_tokens`")
            share = (stats.tokens / mean_tokens).to(of_tokens[0].dtype)
            of_tokens = [share * value for value in of_tokens]
        terms += of_tokens
        if stats.similarity_loss is not None:  # of pairs of samples, with its coefficients
            terms.append(stats.similarity_loss)
    return torch.stack(terms).sum() if terms else None


def _importance(squared: Tensor | None, config: LossConfig) -> Tensor | None:
    """The importance loss in its form; at 0, where a root has no gradient, it gets none."""
    if squared is None or config.importance_form == "squared":
        return squared
    root = squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()
    return torch.where(squared > 0, root, 0)
