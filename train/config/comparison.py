"""Compares factorized experts with the dense model, and with equally many unfactorized experts."""

import math
from typing import Any

from torch import nn

from polyad.model.block import FeedForwardConfig
from polyad.model.build import build_model, count_parameters
from polyad.model.decoder import DecoderSettings
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SparseMoEConfig
from polyad.train.tasks.random_input import flops_of_unit

MOST = 2**31 - 1
"""Maximum number of experts of a sparse mixture."""
SPARSE_TOP_K = 2
"""Experts per token in the sparse mixture of the comparison."""


def experts_compared(model: ModelSettings) -> dict[str, Any] | None:
    """`factorized_experts` for any kind of model; None if it is not a GPT-2."""
    return factorized_experts(model) if isinstance(model, DecoderSettings) else None


def factorized_experts(model: DecoderSettings) -> dict[str, Any] | None:
    """Describes the experts of a muMoE, and the cost of other kinds.

    Args:
        model: its configuration, including the vocabulary size.

    Returns:
        JSON values; None if the experts are not factorized.
    """
    feed_forward = model.known_feed_forward()
    if not isinstance(feed_forward, MuMoEConfig) or model.replaced is not None:
        return None
    experts = math.prod(feed_forward.num_experts)
    inner = feed_forward.inner_size(model.hidden_size)
    full_rank = min(model.hidden_size, inner)
    others: dict[str, FeedForwardConfig] = {"dense": DenseFeedForwardConfig(hidden_size=inner)}
    if 1 < experts <= MOST:  # sparse layers cannot have more
        for name, top_k in (("dense MoE", experts), (f"MoE, top {SPARSE_TOP_K}", SPARSE_TOP_K)):
            others[name] = SparseMoEConfig(
                num_experts=experts, top_k=top_k, expert_hidden_size=inner
            )
    matrix_rank = feed_forward.expert_matrix_rank(model.hidden_size)
    flops = flops_of_unit(model)
    rows = {"this run": _cost(model, feed_forward, flops, experts, matrix_rank)}
    for name, other in others.items():
        number = 1 if name == "dense" else experts
        rows[name] = _cost(model, other, _flops(model, other), number, full_rank)
    return {
        "factorization": feed_forward.factorization,
        "num_experts": list(feed_forward.num_experts),
        "rank": feed_forward.rank,
        "expert_rank": None if feed_forward.factorization == "cp" else feed_forward.expert_rank,
        "gate": feed_forward.gate,
        "level_std": feed_forward.level_std,
        "compared": rows,
    }


def _flops(model: DecoderSettings, feed_forward: FeedForwardConfig) -> int:
    """FLOPs per token of the model with another feed-forward.

    FLOPs of a sparse mixture are linear in the number of experts and in top_k. Since these may be
    too large to run even on shapes alone, they are extrapolated from three small mixtures.
    """
    if not isinstance(feed_forward, SparseMoEConfig):
        return flops_of_unit(model.model_copy(update={"feed_forward": feed_forward}))

    def of(num_experts: int, top_k: int) -> int:
        small = feed_forward.model_copy(update={"num_experts": num_experts, "top_k": top_k})
        return flops_of_unit(model.model_copy(update={"feed_forward": small}))

    least = of(2, 1)
    of_expert, of_chosen = of(3, 1) - least, of(2, 2) - least
    experts, top_k = feed_forward.num_experts, feed_forward.top_k
    return least + (experts - 2) * of_expert + (top_k - 1) * of_chosen


def _cost(
    model: DecoderSettings,
    feed_forward: FeedForwardConfig,
    flops: int,
    experts: int,
    matrix_rank: int,
) -> dict[str, int]:
    """Parameters and FLOPs of the model with another feed-forward."""
    built = build_model(model.model_copy(update={"feed_forward": feed_forward}))
    return {
        "feed_forward_parameters": sum(
            count_parameters(block.get_submodule("feed_forward")) for block in _blocks(built)
        ),
        "parameters": count_parameters(built),
        "flops_per_token": flops,
        "experts_per_block": experts,
        "expert_matrix_rank": matrix_rank,
    }


def _blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("blocks").children())


def comparison_rows(experts: dict[str, Any]) -> list[tuple[str, str]]:
    """Formats the experts and the comparison.

    Returns:
        Names and values; the columns of the comparison are aligned.
    """
    levels = " x ".join(str(number) for number in experts["num_experts"])
    ring = "" if experts["expert_rank"] is None else f", expert rank {experts['expert_rank']}"
    head = f"{'in feed-forwards':>16}  {'in all':>14}  {'FLOPs a token':>13}  experts  matrix rank"
    rows = [
        (
            "experts",
            f"{levels} in each block, {experts['factorization']} of rank {experts['rank']}{ring}; "
            f"{experts['gate']} gate",
        ),
        *_levels_that_stay_alike(experts),
        ("parameters of", head),
    ]
    for name, cost in experts["compared"].items():
        rows.append(
            (
                f"  {name}",
                f"{cost['feed_forward_parameters']:>16,}  {cost['parameters']:>14,}  "
                f"{cost['flops_per_token']:>13.3g}  {cost['experts_per_block']:>7,}  "
                f"{cost['expert_matrix_rank']:>11,}",
            )
        )
    return rows


def _levels_that_stay_alike(experts: dict[str, Any]) -> list[tuple[str, str]]:
    if len(experts["num_experts"]) == 1 or experts["level_std"]:
        return []
    text = "level_std is 0: experts of all levels but the first start equal and stay equal"
    return [("  note", f"model.feed_forward.{text}")]
