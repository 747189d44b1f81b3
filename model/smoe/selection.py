"""Selection of the K experts of each token, and their weights.

Shapes: N tokens, E experts, K experts of a token.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.initialization import ZEROS, Initializer, constant
from polyad.model.layers import Region, same
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig


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


class TopK(Selection):
    """Selects the K highest scores, optionally within the best groups, weighted by `combine`.

    By default they are divided by their sum. With K = 1 that quotient would be the constant 1 and
    the score would get no gradient, so the weight is the score itself, as in Switch (Fedus et al.
    2022). With `combine: softmax` that holds for any K, as in V-MoE (Riquelme et al. 2021); with
    `normalized` the quotient is used for any K. The balancing bias affects the selection but not
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
        best_NK = self.agreed(ranked_NE.topk(self.top_k, dim=-1).indices)
        expert_ids_NK = self.forced(best_NK)
        weights_NK = scores_NE.gather(-1, expert_ids_NK)
        combine = self.config.combine
        if combine == "normalized" or (combine == "renormalized" and self.top_k > 1):
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
