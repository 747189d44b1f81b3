"""The router of a sparse mixture: base scores, a graph of tokens, pools, and top-K selection.

Base scores are logits over the experts, computed from each token alone. To add a score, write a
class here and add a line to `SCORES`, also in a plugin.

Pools restrict the experts that the tokens of a document may use in training (EMO):

    D = the d experts with the highest mean p over the document     d ~ U{least, ..., most}
    q = p on D, divided by its sum

Top-K then uses q instead of p. d is drawn for each document and layer; D has no gradient, q has
that of p. With `prefix` the mean is over the document's tokens up to and including this one, so
that D does not depend on later tokens. There is no pool in evaluation. Source: "EMO: Pretraining
mixture of experts for emergent modularity" (2605.06663).

Shapes: B batch, T tokens in a sequence, N real tokens, D width, E experts, K experts of a token, S
width of the cosine score's space, M maximum experts of a pool.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, normalize

from polyad.model.feedforward import NOTHING_ELSE, BlockInput, FeedForwardContext
from polyad.model.initialization import ZEROS, Initializer, constant, normal, uniform
from polyad.model.kernels import switch
from polyad.model.layers import Linear, RealTokens, Region, pack, same, unpack
from polyad.model.output import RoutingStats, StatisticsModule, entropy, mean_of_samples
from polyad.model.smoe.config import GRAPHS, SCORES, SelectingConfig, SparseMoEConfig
from polyad.model.smoe.graph import Graph, router_dtype
from polyad.model.smoe.losses import (
    importance_loss,
    load_balance_loss,
    load_loss,
    router_z_loss,
    sequence_balance_loss,
)

INITIAL_TEMPERATURE = 0.07
"""Initial temperature of the cosine score, as in X-MoE (Chi et al. 2022, section 3.2)."""


class Score(nn.Module, ABC):
    """The interface of a base score."""

    @abstractmethod
    def columns(self) -> Tensor:
        """Returns the directions of a token that raise each expert's logit, [E, D]."""

    @abstractmethod
    def forward(self, u_ND: Tensor) -> Tensor:
        """Scores the experts.

        Args:
            u_ND: Tokens.

        Returns:
            Logits [N, E], at least fp32; their softmax is r.
        """


class LinearScore(Linear, Score):
    """Logits W u + b (Shazeer et al. 2017).

    Args:
        config: The layer's configuration.
        context: Settings of the model.
        bias: Whether it has a bias if the model's layers have one.
        in_model_dtype: Whether it multiplies in the model's precision, not at least fp32.
    """

    def __init__(
        self,
        config: SelectingConfig,
        context: FeedForwardContext,
        *,
        bias: bool = True,
        in_model_dtype: bool = False,
    ) -> None:
        start, has_bias = normal(context.initializer_std), bias and context.bias
        super().__init__(context.hidden_size, config.num_experts, start, bias=has_bias)
        self.in_model_dtype = in_model_dtype

    def columns(self) -> Tensor:
        """Returns the weight."""
        return self.merged_weight()

    def forward(self, u_ND: Tensor) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        is_wide = not self.in_model_dtype
        if is_wide and u_ND.is_cuda and u_ND.dtype == torch.bfloat16 and not switch.REFERENCE:
            logits_NE: Tensor = ProductInFp32.apply(u_ND, self.weight)  # type: ignore[no-untyped-call]
            logits_NE = logits_NE if self.bias is None else logits_NE + self.bias
        else:
            u_ND = u_ND.to(dtype) if is_wide else u_ND
            bias = None if self.bias is None else self.bias.to(u_ND.dtype)
            logits_NE = linear(u_ND, self.weight.to(u_ND.dtype), bias).to(dtype)
        if self.lora is not None:
            logits_NE = logits_NE + self.lora(u_ND.to(dtype) if is_wide else u_ND)
        return logits_NE


class ProductInFp32(torch.autograd.Function):
    """u W^T in fp32 of factors in bf16, without copies of the factors in fp32 in memory.

    A product of two bf16 numbers is exact in fp32, so this is the product of the copies. The
    gradient is a sum of two bf16 numbers, which keep 16 of its 24 bits.
    """

    @staticmethod
    def forward(ctx: Any, u_ND: Tensor, weight_ED: Tensor) -> Tensor:
        """Returns [N, E]."""
        ctx.save_for_backward(u_ND, weight_ED)
        return _to_fp32(u_ND, weight_ED.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of both factors, in bf16."""
        u_ND, weight_ED = ctx.saved_tensors
        high_NE = gradient_NE.to(u_ND.dtype)
        low_NE = (gradient_NE - high_NE).to(u_ND.dtype)
        parts_N2E = torch.cat((high_NE, low_NE), 1)
        for_weight_2ED = _to_fp32(parts_N2E.t(), u_ND)
        for_weight_ED = torch.add(*for_weight_2ED.chunk(2)).to(weight_ED.dtype)
        return parts_N2E @ torch.cat((weight_ED, weight_ED)), for_weight_ED


def _to_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies matrices in bf16 with a result in fp32; not every processor can without copies."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class CosineScore(Score):
    """Cosine of the projected token and an embedding per expert, divided by a learned temperature.

    Source: Chi et al. 2022, "On the representation collapse of sparse mixture of experts" (X-MoE).
    """

    def __init__(self, config: SelectingConfig, context: FeedForwardContext) -> None:
        super().__init__()
        self.initial, size = normal(context.initializer_std), config.score_size()
        self.projection = nn.Parameter(torch.empty(size, context.hidden_size))
        self.embedding = nn.Parameter(torch.empty(config.num_experts, size))
        self.temperature = nn.Parameter(torch.empty(1))  # DeepSpeed rejects scalar parameters

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers: normal directions, and X-MoE's temperature."""
        return {
            "projection": self.initial,
            "embedding": self.initial,
            "temperature": constant(INITIAL_TEMPERATURE),
        }

    def columns(self) -> Tensor:
        """Returns each expert's direction mapped back through the projection: the weight that gives
        the cosine before the division by the token's length.
        """
        dtype = router_dtype(self.embedding.dtype)
        directions_ES = normalize(self.embedding.to(dtype), dim=-1)
        return directions_ES @ self.projection.to(dtype)

    def forward(self, u_ND: Tensor) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        projected_NS = normalize(linear(u_ND.to(dtype), self.projection.to(dtype)), dim=-1)
        directions_ES = normalize(self.embedding.to(dtype), dim=-1)
        # A learned temperature must not reach zero.
        temperature = self.temperature.to(dtype).clamp_min(0.01)
        return linear(projected_NS, directions_ES) / temperature


class RandomScore(LinearScore):
    """A linear score that is never trained, with PyTorch's uniform initial values.

    Its weight is a buffer: part of a checkpoint, not of the optimizer. Source: Chen et al. 2023,
    "Sparse MoE as the new dropout" (SMoE-dropout).
    """

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(config, context, bias=False)
        del self.weight
        self.register_buffer("weight", torch.empty(config.num_experts, context.hidden_size))
        self.start = uniform(context.hidden_size**-0.5)


SCORES |= {
    "linear": lambda config, context: LinearScore(
        config,
        context,
        bias=config.router_bias,
        in_model_dtype=config.router_dtype == "model",
    ),
    "cosine": CosineScore,
    "random": RandomScore,
}


class Selected(NamedTuple):
    """The selected experts of each token."""

    weights_NK: Tensor
    """Weights of the experts' outputs."""
    expert_ids_NK: Tensor
    """Indices of the experts, int64."""
    counts_E: Tensor
    """Number of tokens that selected each expert, int64."""

    @classmethod
    def of(cls, weights_NK: Tensor, expert_ids_NK: Tensor, num_experts: int) -> "Selected":
        """Counts the tokens of each of E experts; for the other arguments see the fields."""
        return cls(weights_NK, expert_ids_NK, count(expert_ids_NK, num_experts))

    def load(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the share of the assignments that each expert receives, [E]; it sums to 1."""
        return self.counts_E.to(dtype) / self.expert_ids_NK.numel()


def count(expert_ids: Tensor, num_experts: int) -> Tensor:
    """Counts how often each of E experts occurs, [E].

    Args:
        expert_ids: Indices of experts, of any shape.
        num_experts: E.
    """
    ids_A = expert_ids.reshape(-1)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=ids_A.device)
    return counts_E.scatter_add(0, ids_A, torch.ones_like(ids_A))


def spread(selected: Selected, num_experts: int) -> Tensor:
    """Returns the weights of all experts.

    Args:
        selected: The experts of each token.
        num_experts: E.

    Returns:
        [N, E]; 0 for experts that are not selected.
    """
    weights_NK = selected.weights_NK
    weights_NE = weights_NK.new_zeros(weights_NK.shape[0], num_experts)
    return weights_NE.scatter(1, selected.expert_ids_NK, weights_NK)


class Selection(nn.Module, ABC):
    """The interface of expert selection.

    Args:
        config: The layer's configuration.
    """

    def __init__(self, config: SelectingConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.used_experts()
        self.agreed: Region = same
        """Makes ranks that share tokens use the choices of the first of them.

        Each rank computes the scores of all tokens, and sums in no fixed order, or another GPU
        model, may round a score differently. A token that then goes to different experts on two
        ranks would silently get parts of two experts' outputs, since every exchange still has the
        expected sizes.
        """
        self.forced: Region = same
        """Replaces the best experts by others, [N, K] for [N, K], such as recorded ones. Their
        weights follow from the scores."""

    @abstractmethod
    def forward(self, scores_NE: Tensor, logits_NE: Tensor | None = None) -> Selected:
        """Selects experts.

        Args:
            scores_NE: The scores of every expert, each row summing to 1.
            logits_NE: The logits whose softmax the scores are, unless a graph has mixed them; None
                for the logarithms of the scores.

        Returns:
            Weights and experts, the best first.
        """

    def update(self, load_E: Tensor, progress: float) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            load_E: Each expert's share of the assignments over the whole step.
            progress: Fraction of the run's steps that are done.
        """


MOST_ROUNDS = 8
"""Largest K for which `in_rounds` replaces sorting."""


def in_rounds(ranked_NE: Tensor, top_k: int) -> Tensor:
    """Finds the K highest of each row by K rounds of a maximum, which a compiler makes part of the
    kernel that computes the scores; `topk` has kernels of its own.

    Args:
        ranked_NE: Scores, without gradient.
        top_k: K.

    Returns:
        Their numbers [N, K], the highest first; of equal scores the lowest number.
    """
    expert_E = torch.arange(ranked_NE.shape[-1], device=ranked_NE.device)
    ranked_NE = ranked_NE.clamp_min(torch.finfo(ranked_NE.dtype).min)  # -inf marks those found
    found: list[Tensor] = []
    for _ in range(top_k):
        found.append(ranked_NE.argmax(-1, keepdim=True))
        ranked_NE = ranked_NE.masked_fill(expert_E == found[-1], -torch.inf)
    return torch.cat(found, -1)


class TopK(Selection):
    """Selects the K highest scores, optionally within the best groups, weighted by `combine`.

    By default they are divided by their sum. With K = 1 that quotient would be the constant 1 and
    the score would get no gradient, so the weight is the score itself, as in Switch (Fedus et al.
    2022). With `combine: scores` that holds for any K, as in V-MoE (Riquelme et al. 2021); with
    `sum_to_one` the quotient is used for any K. The balancing bias affects the selection but not
    the weights (Wang et al. 2024, "Auxiliary-loss-free load balancing").

    The state is in buffers: `forward` uses them, and `update` is called after each optimizer step.

    Args:
        config: The layer's configuration.
    """

    balancing_bias: Tensor
    num_selected: Tensor

    def __init__(self, config: SparseMoEConfig) -> None:
        # The buffer `num_selected` as a number: reading it in `forward` would synchronize with the
        # device, and later shapes depend on it. `compile_model` makes programs accept any number.
        super().__init__(config)
        self.config = config
        self.is_biased = bool(config.balancing_rate or config.selection_bias)
        # The highest of scores that sum to 1 is above 0. Sigmoids may all be 0, and a bias, or
        # forced experts, may select experts whose scores are 0.
        self.may_be_zero = self.is_biased or config.score_function == "sigmoid"
        if self.is_biased:
            self.register_buffer("balancing_bias", torch.empty(config.num_experts))
        if config.final_top_k is not None:
            self.register_buffer("num_selected", torch.empty((), dtype=torch.int64))

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers: zero bias, and the initial K."""
        return {"balancing_bias": ZEROS, "num_selected": constant(self.config.top_k)}

    def buffers_changed(self) -> None:
        """Reads K from the buffer after a checkpoint has been loaded."""
        if self.config.final_top_k is not None:
            self.top_k = int(self.num_selected)

    @torch.no_grad()
    def update(self, load_E: Tensor, progress: float) -> None:
        """Updates the bias, and increases K if it is due."""
        if self.config.balancing_rate:
            step_E = torch.sign(load_E.mean() - load_E).to(self.balancing_bias.dtype)
            self.balancing_bias += self.config.balancing_rate * step_E
        if self.config.final_top_k is not None:
            first, last = self.config.top_k, self.config.final_top_k
            # Every K from the first to the last is used for an equal part of the run.
            grown = first + int(progress * (last - first + 1) + 1e-9)
            # A finished run that is extended keeps its K.
            if min(grown, last) > self.top_k:
                self.top_k = min(grown, last)
                self.num_selected.fill_(self.top_k)  # read back, it would wait for the device

    def forward(self, scores_NE: Tensor, logits_NE: Tensor | None = None) -> Selected:
        """See `Selection.forward`; selects by the scores, plus the bias if there is one."""
        ranked_NE = scores_NE
        if self.is_biased:
            ranked_NE = scores_NE + self.balancing_bias.to(scores_NE.dtype)
            if self.config.pool != "none" and self.training:  # outside a pool scores are 0
                ranked_NE = ranked_NE.masked_fill(scores_NE == 0, -torch.inf)
        if self.config.num_groups > 1:
            ranked_NE = self._within_groups(ranked_NE)
        is_fixed = self.config.final_top_k is None and self.top_k <= MOST_ROUNDS
        if is_fixed and switch.compiled_on_gpu(ranked_NE):
            best_NK = in_rounds(ranked_NE.detach(), self.top_k)
        else:
            best_NK = ranked_NE.topk(self.top_k, dim=-1).indices
        best_NK = self.agreed(best_NK)
        expert_ids_NK = self.forced(best_NK)
        weights_NK = scores_NE.gather(-1, expert_ids_NK)
        combine = self.config.combine
        if combine == "sum_to_one" or (combine == "auto" and self.top_k > 1):
            sum_N1 = weights_NK.sum(-1, keepdim=True)
            if self.may_be_zero or self.forced is not same:
                weights_NK = weights_NK / sum_N1.clamp_min(torch.finfo(sum_N1.dtype).tiny)
                weights_NK = torch.where(sum_N1 > 0, weights_NK, 1 / self.top_k)
            else:
                weights_NK = weights_NK / sum_N1
        if self.config.routed_scaling_factor != 1:
            weights_NK = weights_NK * self.config.routed_scaling_factor
        return Selected.of(weights_NK, expert_ids_NK, self.num_experts)

    def _within_groups(self, ranked_NE: Tensor) -> Tensor:
        """Keeps the experts of the best groups, and sets all others to -inf."""
        config = self.config
        grouped_NGe = ranked_NE.view(ranked_NE.shape[0], config.num_groups, -1)
        best = 2 if config.group_score == "best_two" else 1
        of_groups_NG = grouped_NGe.topk(best, dim=-1).values.sum(-1)
        kept = of_groups_NG.topk(config.top_groups, dim=-1).indices
        left_out_NG = torch.ones_like(of_groups_NG, dtype=torch.bool).scatter(-1, kept, False)
        kept_NGe = grouped_NGe.masked_fill(left_out_NG.unsqueeze(-1), -torch.inf)
        return kept_NGe.flatten(1)


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


class Router(StatisticsModule):
    """Scores each token, mixes the scores over a graph of tokens, and selects experts by them.

    Args:
        score: The base score.
        graph: The graph of tokens.
        selection: The selection of experts.
        noise_std: Standard deviation of the noise on logits in training; 0 adds none.
        by_sigmoid: Whether scores are sigmoids of the logits, rather than their softmax. Statistics
            and losses then use them divided by their sum.
        pool: The experts that tokens can use in training; None for all.
    """

    def __init__(
        self,
        score: Score,
        graph: Graph,
        selection: Selection,
        noise_std: float = 0.0,
        *,
        by_sigmoid: bool = False,
        pool: Pool | None = None,
    ) -> None:
        super().__init__()
        self.score, self.graph, self.selection, self.pool = score, graph, selection, pool
        self.noise_std, self.by_sigmoid = noise_std, by_sigmoid

    def scored(self, logits_NE: Tensor) -> Tensor:
        """Computes the scores of logits [N, E]."""
        return logits_NE.sigmoid() if self.by_sigmoid else logits_NE.softmax(-1)

    def forward(
        self, u_BTD: Tensor, given: BlockInput = NOTHING_ELSE
    ) -> tuple[Selected, RoutingStats]:
        """Selects the experts of every token.

        Args:
            u_BTD: The input of the experts.
            given: Further inputs, for the graph.

        Returns:
            Experts and weights of the N real tokens, and statistics with an empty name.
        """
        real = given.real
        u_ND = pack(u_BTD.flatten(0, 1), real)
        logits_NE = noisy_NE = self.score(u_ND)
        own_NE = scores_NE = self.scored(logits_NE)
        if self.training and self.noise_std:
            # From the default generator: every tensor-parallel rank draws the same numbers, and
            # recomputation draws them again.
            noisy_NE = logits_NE + self.noise_std * torch.randn_like(logits_NE)
            scores_NE = self.scored(noisy_NE)
        scores_BTE = unpack(scores_NE, real).view(*u_BTD.shape[:2], -1)
        mixed = self.graph(scores_BTE, u_BTD, given)
        mixed_NE = scores_NE
        if mixed.scores_BTE is not scores_BTE:
            mixed_NE = pack(mixed.scores_BTE.flatten(0, 1), real)
        if self.pool is not None and self.training:
            pooled_BTE = unpack(mixed_NE, real).view_as(scores_BTE)
            pool_NE = pack(self.pool(pooled_BTE, given.document_start_BT).flatten(0, 1), real)
            mixed_NE = within(mixed_NE, pool_NE)
        is_own = mixed_NE is scores_NE and noisy_NE is logits_NE
        selected: Selected = self.selection(mixed_NE, noisy_NE)
        shares_NE = mixed_NE
        if self.by_sigmoid:
            shares_NE = mixed_NE / mixed_NE.sum(-1, keepdim=True)
            own_NE = shares_NE if is_own else own_NE / own_NE.sum(-1, keepdim=True)
        usage_E = None
        if self.needs("usage_E") or self.needs("balance_loss"):
            usage_E = shares_NE.mean(0)
        load_E = selected.load(shares_NE.dtype)
        losses: dict[str, Tensor] = {}
        measures = dict(mixed.measures)
        if self.measures:
            measures["entropy"] = entropy(shares_NE.detach()).mean()
            measures["dropped"] = load_E.new_zeros(())
        if self.training:
            if usage_E is not None and self.needs("balance_loss"):
                mean_E = self.for_loss("balance_loss", usage_E)
                losses["balance_loss"] = load_balance_loss(mean_E, load_E)
            if self.needs("z_loss"):
                losses["z_loss"] = router_z_loss(self.for_loss("z_loss", logits_NE))
            if self.needs("importance_loss"):
                own_E = usage_E if is_own and usage_E is not None else own_NE.mean(0)
                losses["importance_loss"] = importance_loss(self.for_loss("importance_loss", own_E))
            if noisy_NE is not logits_NE and self.needs("load_loss"):
                losses["load_loss"] = load_loss(
                    self.for_loss("load_loss", logits_NE),
                    self.for_loss("load_loss", noisy_NE),
                    self.noise_std,
                    self.selection.top_k,
                )
            if "sequence_loss" in self.learns_from:
                losses["sequence_loss"] = self._of_sequences(own_NE, u_BTD, real)
        stats = RoutingStats(
            name="",
            load_E=load_E,
            usage_E=None if usage_E is None else self.for_loss("usage_E", usage_E),
            tokens=None if real is None else real.mask_BT.sum().to(load_E.dtype),
            losses=losses,
            measures=measures,
        )
        return selected, self.with_samples(stats, [own_NE], u_BTD, real)

    def _of_sequences(self, own_NE: Tensor, u_BTD: Tensor, real: RealTokens | None) -> Tensor:
        """Computes the balance loss within sequences, without noise, graph, groups and bias."""
        top_k = self.selection.top_k
        best_NK = self.selection.agreed(own_NE.detach().topk(top_k, dim=-1).indices)
        chosen_NE = torch.zeros_like(own_NE).scatter(1, best_NK, 1)
        chosen_BE = mean_of_samples(chosen_NE, u_BTD, real)
        return sequence_balance_loss(chosen_BE, mean_of_samples(own_NE, u_BTD, real), top_k)

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            stats: The layer's statistics, averaged over the step.
            progress: Fraction of the run's steps that are done.
        """
        self.selection.update(stats.load_E, progress)
        self.graph.update(stats.measures)


def make_router(config: SparseMoEConfig, context: FeedForwardContext) -> Router:
    """Builds the router of a sparse mixture, with its score and its graph.

    Args:
        config: The layer's configuration.
        context: Settings of the model.
    """
    return Router(
        SCORES[config.score](config, context),
        GRAPHS[config.graph](config, context),
        TopK(config),
        config.router_noise / config.num_experts,
        by_sigmoid=config.score_function == "sigmoid",
        pool=None if config.pool == "none" else Pool(config),
    )
