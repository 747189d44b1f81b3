"""Auxiliary losses of routed layers, which are added to the loss of a task.

The sample-similarity loss sends similar samples to the same expert, different ones to others:

  L_s = 1 / (N^2 - N) sum_{x, x'} [ 1 / M        sum_e        beta_s p(e|x) p(e|x')  d(x, x')
                                  - 1 / (M^2 - M) sum_{e != e'} beta_d p(e|x) p(e'|x') d(x, x') ]

p are a sample's routing probabilities, averaged over its tokens, without noise and before a graph,
as in the importance loss; a muMoE with several levels has one loss per level. Probabilities sum to
1, so the second sum over experts is 1 - <p, p'>, and with D for all distances

    L_s (N^2 - N) = (beta_s / M + beta_d / (M^2 - M)) tr(P^T D P) - beta_d / (M^2 - M) sum D.

Source: Krishnamurthy et al. 2023, "Improving expert specialization in mixture of experts", section
6, equation 10. Their code divides a distance by the largest of the batch, the first sum by nothing
and the second by N^2: `distance: batch_maximum` has their distance, and the divisor of the paper.

The loss is not linear in the batch and is computed per micro-batch and process, like the balance
loss: it is the same on all layouts with the same `train.micro_batch_size`.

Shapes: N samples of a micro-batch, I numbers of an input, M experts of a level, S experts of all
levels and layers side by side.
"""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from polyad.model.config import Config
from polyad.model.output import ModelOutput, RoutingStats
from polyad.model.smoe.losses import load_balance_loss
from polyad.train.tasks.task import Predictor

ROWS = 256
"""Number of rows of the distance matrix that are in memory at a time."""


class SampleSimilarityConfig(Config):
    """A loss over the pairs of samples in each micro-batch."""

    same: Annotated[float, Field(gt=0, le=1e9)]
    """beta_s, the penalty when distant samples share an expert."""
    different: Annotated[float, Field(gt=0, le=1e9)]
    """beta_d, the reward when distant samples use different experts."""
    distance: Literal["squared", "batch_maximum"] = "squared"
    """Distance of two samples: `squared`, the squared Euclidean distance as in the paper;
    `batch_maximum`, the Euclidean distance divided by the largest in the micro-batch, as in the
    authors' code."""
    of: Literal["input", "layer_input"] = "input"
    """What distances are measured between: `input`, the pixels as the model reads them;
    `layer_input`, the input of each layer's router, averaged over a sample's tokens."""


class InputRecorder:
    """A predictor that keeps the inputs of its last forward pass.

    Args:
        model: The predictor.
        as_read: Maps the first input to what the model reads; None: the input itself.
    """

    def __init__(self, model: Predictor, as_read: Callable[[Tensor], Tensor] | None = None) -> None:
        self._model, self._as_read = model, as_read
        self.cross_entropy = model.cross_entropy
        self.inputs: Tensor | None = None
        """The first input, whose first axis counts samples."""

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        """The forward pass."""
        self.inputs = inputs[0] if self._as_read is None else self._as_read(inputs[0])
        return self._model(*inputs, **named)


class Weighted(NamedTuple):
    """Scores and distances, summed."""

    scores_NS: Tensor
    """D P: for each sample, the sum of all samples' scores times their distance to it."""
    total: Tensor
    """The sum of all distances; no dimensions."""


@torch.no_grad()
def weigh_by_distance(
    inputs_NI: Tensor, scores_NS: Tensor, config: SampleSimilarityConfig, rows: int = ROWS
) -> Weighted:
    """Computes D P in O(N^2), a few rows of D at a time. Inputs get no gradient.

    Args:
        inputs_NI: Inputs, of any further shape.
        scores_NS: P.
        config: Selects the distance.
        rows: Number of rows of D in memory at a time.
    """
    x_NI = inputs_NI.flatten(1).to(scores_NS.dtype)
    x_NI = x_NI - x_NI.mean(0)  # keeps distances, and loses less precision below
    square_N = x_NI.square().sum(1)
    total = largest = scores_NS.new_zeros(())
    parts = []
    for first in range(0, len(x_NI), rows):
        x_RI, square_R = x_NI[first : first + rows], square_N[first : first + rows]
        d_RN = torch.addmm(square_N, x_RI, x_NI.T, alpha=-2).add_(square_R[:, None]).clamp_min_(0)
        d_RN.diagonal(first).zero_()
        if config.distance == "batch_maximum":
            d_RN = d_RN.sqrt()
            largest = torch.maximum(largest, d_RN.max())
        parts.append(d_RN @ scores_NS)
        total = total + d_RN.sum()
    weighted_NS = torch.cat(parts)
    if config.distance == "batch_maximum":
        largest = largest.clamp_min(torch.finfo(largest.dtype).tiny)
        weighted_NS, total = weighted_NS / largest, total / largest
    return Weighted(weighted_NS, total)


def sample_similarity_loss(
    scores_NM: Tensor, weighted: Weighted, config: SampleSimilarityConfig
) -> Tensor:
    """Computes the loss of one level of experts.

    Args:
        scores_NM: P, with its gradient.
        weighted: `weigh_by_distance` of these experts' scores.
        config: The coefficients.

    Returns:
        A scalar. Not linear in the batch: it belongs to one micro-batch of one process.
    """
    samples, experts = scores_NM.shape
    same = config.same / experts
    different = config.different / max(1, experts * (experts - 1))
    # tr(P^T D P) has the gradient 2 D P, of which D P is known: once as it is, once as a constant.
    shared = (scores_NM * weighted.scores_NS).sum()
    shared = 2 * shared - shared.detach()
    return ((same + different) * shared - different * weighted.total) / (samples * (samples - 1))


def with_sample_similarity(
    routing: tuple[RoutingStats, ...], inputs: Tensor | None, config: SampleSimilarityConfig
) -> tuple[RoutingStats, ...]:
    """Replaces the per-sample statistics by the loss computed from them.

    Returns:
        Statistics with `similarity_loss`, without those per sample.
    """
    sampled = [stats for stats in routing if stats.sample_scores_BS is not None]
    weighted = iter(_weighted(sampled, inputs, config))
    changed = []
    for stats in routing:
        if (scores_NS := stats.sample_scores_BS) is not None:
            sizes, of_layer = list(stats.levels or scores_NS.shape[1:]), next(weighted)
            p_LNM, w_LNM = (x.split_with_sizes(sizes, 1) for x in (scores_NS, of_layer.scores_NS))
            losses = [
                sample_similarity_loss(p_NM, of_layer._replace(scores_NS=w_NM), config)
                for p_NM, w_NM in zip(p_LNM, w_LNM, strict=True)
            ]
            stats = stats._replace(
                losses=stats.losses | {"similarity_loss": torch.stack(losses).sum()},
                sample_scores_BS=None,
                sample_inputs_BD=None,
            )
        changed.append(stats)
    return tuple(changed)


def _weighted(
    sampled: list[RoutingStats], inputs: Tensor | None, config: SampleSimilarityConfig
) -> list[Weighted]:
    """The scores of each layer times distances, which are computed once if all layers share
    them."""
    scores = [stats.sample_scores_BS for stats in sampled if stats.sample_scores_BS is not None]
    if config.of == "input" and scores:
        assert inputs is not None
        whole = weigh_by_distance(inputs, torch.cat([s.detach() for s in scores], dim=1), config)
        parts_NS = whole.scores_NS.split_with_sizes([s.shape[1] for s in scores], dim=1)
        return [Weighted(part_NS, whole.total) for part_NS in parts_NS]
    inputs_of_layers = [s.sample_inputs_BD for s in sampled if s.sample_inputs_BD is not None]
    pairs = zip(inputs_of_layers, scores, strict=True)
    return [weigh_by_distance(inputs_BD, scores_BS, config) for inputs_BD, scores_BS in pairs]


class LossConfig(Config):
    """Auxiliary losses of every layer that routes, which are added to the task's mean loss.

    Each loss is computed for one micro-batch of one process. The z-loss is a mean over tokens and
    the sequence balance a mean over sequences, so these do not depend on how a batch is divided
    into micro-batches. Load balance, importance and load are nonlinear in means over tokens, and
    sample similarity compares pairs: they are averaged over micro-batches, and change with
    `train.micro_batch_size`.
    """

    load_balance: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the load-balancing loss E sum_e f_e P_e of a micro-batch (Switch: 0.01); 0
    turns it off."""
    load_balance_over: Literal["layer", "model"] = "layer"
    """What f and P of the load-balancing loss are averaged over: `layer`, the tokens of each layer
    separately, and the losses of all layers are summed (Switch); or `model`, the tokens of all
    layers together, in one loss, as in Hugging Face transformers, where this coefficient is K times
    `router_aux_loss_coef`."""
    load_balance_counts: Literal["process", "all"] = "process"
    """Which tokens f of the load-balancing loss counts: those in the micro-batch of this `process`,
    or those in the simultaneous micro-batches of `all` processes, which then exchange f of all
    layers (recommended by EMO, because balancing within one process works against its expert
    pools). P remains that of each process; the mean over processes is the loss over all tokens."""
    sequence_balance: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the load-balancing loss within each sequence, which is 1 at even load
    (DeepSeek-V3: 0.0001); 0 turns it off."""
    router_z: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the router z-loss, the mean squared logsumexp of the router logits (ST-MoE:
    0.001); 0 turns it off."""
    importance: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the importance loss, which measures how unevenly the scores of a micro-batch
    are distributed over experts (V-MoE: 0.005); 0 turns it off."""
    importance_form: Literal["squared", "plain"] = "squared"
    """Form of the importance loss: `squared`, the squared coefficient of variation of the experts'
    summed scores (V-MoE), or `plain`, the coefficient of variation itself (Krishnamurthy et al.
    2023)."""
    load: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Coefficient of the load loss, the squared coefficient of variation of the expected load under
    the router's noise (V-MoE: 0.005); needs router_noise. 0 turns it off."""
    sample_similarity: SampleSimilarityConfig | None = None
    """A loss that sends similar samples of a micro-batch to the same expert and dissimilar ones to
    different experts; null: not used."""

    def coefficients(self) -> dict[str, float]:
        """The nonzero coefficients of losses over tokens (not over whole samples), by their names
        in `RoutingStats.losses`."""
        values = {
            "balance_loss": self.load_balance if self.load_balance_over == "layer" else 0.0,
            "sequence_loss": self.sequence_balance,
            "z_loss": self.router_z,
            "importance_loss": self.importance,
            "load_loss": self.load,
        }
        return {name: coefficient for name, coefficient in values.items() if coefficient}

    def asked(self) -> frozenset[str]:
        """Losses of `RoutingStats`, or `usage_E`, that need a gradient."""
        reads_usage = self.load_balance_over == "model" or self.load_balance_counts == "all"
        usage = {"usage_E"} if self.load_balance and reads_usage else set()
        return frozenset({*self.coefficients(), *usage})


def routing_loss(
    routing: tuple[RoutingStats, ...], config: LossConfig, mean_tokens: Tensor | None = None
) -> Tensor | None:
    """Returns the weighted sum of the losses of all routed layers.

    A step's loss is the mean over its micro-batches. If these have different numbers of tokens
    because of padding, losses over tokens are multiplied by the micro-batch's tokens divided by
    their mean, so that the step's mean is over tokens.

    Args:
        routing: as the model returned it.
        config: the coefficients.
        mean_tokens: mean over all micro-batches of the step, on all processes; None where all have
            equally many, and `RoutingStats.tokens` is None.

    Returns:
        A scalar; None if there is nothing to add.
    """
    terms = []
    if config.load_balance and config.load_balance_over == "model":
        sparse = [(stats.usage_E, stats.load_E) for stats in routing if stats.usage_E is not None]
        usages, loads = zip(*sparse, strict=True)
        pooled = load_balance_loss(torch.stack(usages).mean(0), torch.stack(loads).mean(0))
        terms.append(_by_tokens(config.load_balance * pooled, routing[0], mean_tokens))
    for stats in routing:
        for name, coefficient in config.coefficients().items():
            if (value := stats.losses.get(name)) is None:
                continue
            if name == "importance_loss" and config.importance_form == "plain":
                value = _root(value)
            term = coefficient * value
            of_tokens = name != "sequence_loss"
            terms.append(_by_tokens(term, stats, mean_tokens) if of_tokens else term)
        if "similarity_loss" in stats.losses:  # over pairs of samples; includes its coefficients
            terms.append(stats.losses["similarity_loss"])
    return torch.stack(terms).sum() if terms else None


def with_counts_of_all(
    routing: tuple[RoutingStats, ...], mean: Callable[[Tensor], Tensor]
) -> tuple[RoutingStats, ...]:
    """Replaces this process's counts by those over all processes' micro-batches.

    Args:
        routing: as the model returned it, `usage_E` with gradient.
        mean: averages a tensor over all processes; processes that share tokens all have them.

    Returns:
        Statistics whose `load_E` is f over all processes, and whose `balance_loss` follows from it
        and from this process's P.
    """
    sparse = [stats for stats in routing if stats.usage_E is not None]
    if not sparse:
        return routing
    # With padding, processes are weighted by their number of tokens.
    tokens = [stats.load_E.new_ones(()) if stats.tokens is None else stats.tokens
              for stats in sparse]  # fmt: skip
    loads = [stats.load_E * n for stats, n in zip(sparse, tokens, strict=True)]
    sizes = [len(load_E) for load_E in loads]
    means = mean(torch.cat([*loads, torch.stack(tokens)]))
    *loads, means_L = means.split_with_sizes([*sizes, len(sparse)])
    of_all = iter([load_E / n for load_E, n in zip(loads, means_L, strict=True)])
    changed = []
    for stats in routing:
        if (usage_E := stats.usage_E) is not None:
            stats = stats._replace(load_E=next(of_all))
            if "balance_loss" in stats.losses:
                balance = load_balance_loss(usage_E, stats.load_E)
                stats = stats._replace(losses=stats.losses | {"balance_loss": balance})
        changed.append(stats)
    return tuple(changed)


def _by_tokens(term: Tensor, stats: RoutingStats, mean_tokens: Tensor | None) -> Tensor:
    """Scales a mean over a micro-batch's tokens by their number over its mean, if padded."""
    if stats.tokens is None:
        return term
    assert mean_tokens is not None
    return (stats.tokens / mean_tokens).to(term.dtype) * term


def _root(squared: Tensor) -> Tensor:
    """The root of a loss; no gradient at 0, where a root has none."""
    root = squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()
    return torch.where(squared > 0, root, 0)
