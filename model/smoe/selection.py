"""Selection: the K experts of each token, and their weights.

Shapes: N tokens, E experts, K experts of a token.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.initialization import ZEROS, Initializer, constant
from polyad.model.regions import Region, same
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig


class Selected(NamedTuple):
    """The selected experts of each token."""

    weights_NK: Tensor
    """Weights of the experts' outputs."""
    expert_ids_NK: Tensor
    """Indices of the experts, int64."""
    counts_E: Tensor
    """How many tokens selected each expert, int64."""
    priority_N: Tensor | None = None
    """Where a capacity asks for it: which tokens go first, the highest number before all others."""

    @classmethod
    def of(
        cls,
        weights_NK: Tensor,
        expert_ids_NK: Tensor,
        num_experts: int,
        priority_N: Tensor | None = None,
    ) -> "Selected":
        """Counts the tokens of each of E experts; for the rest see the fields."""
        counts_E = count(expert_ids_NK, num_experts)
        return cls(weights_NK, expert_ids_NK, counts_E, priority_N)

    def load(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The share of the assignments that each expert receives, [E]; it sums to 1."""
        return self.counts_E.to(dtype) / self.expert_ids_NK.numel()


def count(expert_ids: Tensor, num_experts: int) -> Tensor:
    """How often each of E experts is named, [E].

    Args:
        expert_ids: Indices of experts, of any shape.
        num_experts: E.
    """
    ids_A = expert_ids.reshape(-1)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=ids_A.device)
    return counts_E.scatter_add(0, ids_A, torch.ones_like(ids_A))


def spread(selected: Selected, num_experts: int) -> Tensor:
    """The weights of all experts.

    Args:
        selected: The experts of each token.
        num_experts: E.

    Returns:
        [N, E]; 0 where an expert is not selected.
    """
    weights_NK = selected.weights_NK
    weights_NE = weights_NK.new_zeros(weights_NK.shape[0], num_experts)
    return weights_NE.scatter(1, selected.expert_ids_NK, weights_NK)


class Selection(nn.Module, ABC):
    """The interface of a selection.

    Args:
        config: The layer's configuration.
    """

    def __init__(self, config: SelectingConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.used_experts()
        self.by_priority = config.capacity_order == "priority"
        self.agreed: Region = same
        """What the first of the processes that share tokens has.

        Each computes the scores of all tokens, and sums whose order is not fixed, or another kind
        of GPU, may round one differently. A token that then goes to other experts on one process
        than on another would get parts of two experts' outputs, and nothing would say so: every
        exchange still has the sizes that both sides expect.
        """
        self.forced: Region = same
        """What puts other experts in the place of the best ones, [N, K] for [N, K], such as
        recorded ones. The weights are those that the scores give them."""

    @abstractmethod
    def forward(self, scores_NE: Tensor, logits_NE: Tensor | None = None) -> Selected:
        """Selects.

        Args:
            scores_NE: The scores of every expert, each row summing to 1.
            logits_NE: Whose softmax they are, unless a graph has mixed them; None: their
                logarithms.

        Returns:
            Weights and experts, the best first.
        """

    def selected(self, weights_NK: Tensor, expert_ids_NK: Tensor, scores_NE: Tensor) -> Selected:
        """Adds what dispatch asks for; a token's priority is its highest score."""
        priority_N = self.agreed(scores_NE.detach().amax(-1)) if self.by_priority else None
        return Selected.of(weights_NK, expert_ids_NK, self.num_experts, priority_N)

    def update(self, load_E: Tensor, progress: float) -> None:
        """Prepares the next optimizer step; called once after each.

        Args:
            load_E: The share of the assignments of each expert, over the whole step.
            progress: Share of the run's steps that are done.
        """


class TopK(Selection):
    """The K highest scores, perhaps of the best groups, weighted as `combine` says.

    By default they are divided by their sum. With K = 1 that quotient would be the constant 1 and
    the score would get no gradient: the weight is then the score itself, as in Switch (Fedus et al.
    2022). With `combine: softmax` it is so for any K, as in V-MoE (Riquelme et al. 2021); with
    `normalized` the quotient holds for any K. The balancing bias affects the
    selection, and not the weights (Wang et al. 2024, "Auxiliary-loss-free load balancing").

    Its state is in buffers: `forward` reads them, `update` is called after each optimizer step.

    Args:
        config: The layer's configuration.
    """

    balancing_bias: Tensor
    num_selected: Tensor

    def __init__(self, config: SparseMoEConfig) -> None:
        # The buffer `num_selected` as a number: reading it in `forward` would wait for the device,
        # and the shapes of what follows depend on it. `compile_model` has programs take any number.
        super().__init__(config)
        self.config = config
        self.is_biased = bool(config.balancing_rate or config.selection_bias)
        # The highest of scores that sum to 1 is not 0. Sigmoids may all be, and a bias may select
        # experts whose scores are, as what is forced may.
        self.may_be_zero = self.is_biased or config.score_function == "sigmoid"
        if self.is_biased:
            self.register_buffer("balancing_bias", torch.empty(config.num_experts))
        if config.final_top_k is not None:
            self.register_buffer("num_selected", torch.empty((), dtype=torch.int64))

    def initializers(self) -> dict[str, Initializer]:
        """Zero bias, and the first K."""
        return {"balancing_bias": ZEROS, "num_selected": constant(self.config.top_k)}

    def buffers_changed(self) -> None:
        """Reads K from the buffer, after a checkpoint was loaded into it."""
        if self.config.final_top_k is not None:
            self.top_k = int(self.num_selected)

    @torch.no_grad()
    def update(self, load_E: Tensor, progress: float) -> None:
        """Moves the bias, and lets K grow."""
        if self.config.balancing_rate:
            step_E = torch.sign(load_E.mean() - load_E).to(self.balancing_bias.dtype)
            self.balancing_bias += self.config.balancing_rate * step_E
        if self.config.final_top_k is not None:
            first, last = self.config.top_k, self.config.final_top_k
            # Every K from the first to the last is used for an equal share of the run.
            grown = first + int(progress * (last - first + 1) + 1e-9)
            # A run that is made longer once it is done keeps what it has.
            if min(grown, last) > self.top_k:
                self.top_k = min(grown, last)
                self.num_selected.fill_(self.top_k)  # read back, it would wait for the device

    def forward(self, scores_NE: Tensor, logits_NE: Tensor | None = None) -> Selected:
        """See `Selection.forward`; the highest scores, or scores with the bias, come first."""
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
        return self.selected(weights_NK, expert_ids_NK, scores_NE)

    def _within_groups(self, ranked_NE: Tensor) -> Tensor:
        """Leaves the experts of the best groups, and -inf for all others."""
        config = self.config
        grouped_NGe = ranked_NE.view(ranked_NE.shape[0], config.num_groups, -1)
        best = 2 if config.group_score == "best_two" else 1
        of_groups_NG = grouped_NGe.topk(best, dim=-1).values.sum(-1)
        kept = of_groups_NG.topk(config.top_groups, dim=-1).indices
        left_out_NG = torch.ones_like(of_groups_NG, dtype=torch.bool).scatter(-1, kept, False)
        kept_NGe = grouped_NGe.masked_fill(left_out_NG.unsqueeze(-1), -torch.inf)
        return kept_NGe.flatten(1)
