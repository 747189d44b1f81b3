"""Selection: the K experts of each token, and their weights.

Shapes: N tokens, E experts, K experts of a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.initialization import ZEROS, Initializer, constant
from polyad.model.smoe.config import SparseMoEConfig


class Selected(NamedTuple):
    """The selected experts of each token."""

    weights_NK: Tensor
    """Weights of the experts' outputs."""
    expert_ids_NK: Tensor
    """Indices of the experts, int64."""
    priority_N: Tensor | None = None
    """Where a capacity asks for it: which tokens go first, the highest number before all others."""


def spread(selected: Selected, num_experts: int) -> Tensor:
    """The weights of all experts.

    Args:
        selected: Of each token.
        num_experts: E.

    Returns:
        [N, E]; 0 where an expert is not selected.
    """
    weights_NK = selected.weights_NK
    weights_NE = weights_NK.new_zeros(weights_NK.shape[0], num_experts)
    return weights_NE.scatter(1, selected.expert_ids_NK, weights_NK)


class TopK(nn.Module):
    """The K highest scores, divided by their sum if K > 1 and `combine` says so.

    With K = 1 that quotient would be the constant 1 and the score would get no gradient: the weight
    is then the score itself, as in Switch (Fedus et al. 2022). With `combine: softmax` it is so for
    any K, as in V-MoE (Riquelme et al. 2021). The balancing bias affects the
    selection, and not the weights (Wang et al. 2024, "Auxiliary-loss-free load balancing").

    Its state is in buffers: `forward` reads them, `update` is called after each optimizer step.

    Args:
        config: Of the layer.
    """

    balancing_bias: Tensor
    num_selected: Tensor

    def __init__(self, config: SparseMoEConfig) -> None:
        super().__init__()
        self.config = config
        # The buffer as a number: reading a buffer in `forward` would wait for the device, and the
        # shapes of what follows depend on it. `compile_model` has programs take any number.
        self.top_k = config.top_k
        # Tensor parallelism replaces it: processes that share tokens compute their scores each, and
        # rounding may give a token other experts on one of them.
        self.agreed: nn.Module = nn.Identity()
        if config.balancing_rate:
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
        """Prepares the next optimizer step.

        Args:
            load_E: The share of the assignments of each expert, over the whole step.
            progress: Share of the run's steps that are done.
        """
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

    def forward(self, scores_NE: Tensor) -> Selected:
        """Selects.

        Args:
            scores_NE: Of every expert, each row summing to 1.

        Returns:
            Weights and experts, the highest first: of scores, or of scores with the bias.
        """
        ranked_NE = scores_NE
        if self.config.balancing_rate:
            ranked_NE = scores_NE + self.balancing_bias.to(scores_NE.dtype)
        expert_ids_NK: Tensor = self.agreed(ranked_NE.topk(self.top_k, dim=-1).indices)
        weights_NK = scores_NE.gather(-1, expert_ids_NK)
        if self.top_k > 1 and self.config.combine == "renormalized":
            sum_N1 = weights_NK.sum(-1, keepdim=True)
            weights_NK = weights_NK / sum_N1.clamp_min(torch.finfo(sum_N1.dtype).tiny)
            # The bias may select experts whose scores all underflow to 0.
            weights_NK = torch.where(sum_N1 > 0, weights_NK, 1 / self.top_k)
        return Selected(weights_NK, expert_ids_NK, self.priority(scores_NE))

    def priority(self, scores_NE: Tensor) -> Tensor | None:
        """See `Selected.priority_N`: a token's highest score.

        Args:
            scores_NE: Of every expert.
        """
        if self.config.capacity_order != "priority":
            return None
        priority_N: Tensor = self.agreed(scores_NE.detach().amax(-1))
        return priority_N
