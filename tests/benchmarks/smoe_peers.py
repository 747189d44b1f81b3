"""Variants of `layer.py --kind smoe`: a sparse layer in several forms, a dense one.

Shapes: N tokens, D width, E experts, K experts of a token, F inner width of one expert.
"""

import torch
from torch import Tensor, nn

from polyad.model.feedforward import DenseFeedForward, DenseFeedForwardConfig
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.layer import SparseMoE
from polyad.model.smoe.router import LinearScore
from polyad.parallel.zero import import_deepspeed
from tests.benchmarks.timed_layer import TimedLayer, context_of, of_ours, start

REFERENCE = "loop"
SKEW = 8.0
"""How far a token's score of the one expert is moved; the scores' standard deviation is 1."""


def orthogonal_router(num_experts: int, width: int) -> Tensor:
    """The router's weight [E, D]: scores of normal tokens are independent, if E is not above D."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.init.orthogonal_(torch.empty(num_experts, width))


def make_tokens(num_tokens: int, router_ED: Tensor, load: str) -> Tensor:
    """Tokens [N, D] in fp32; skewed, expert 0 is the first choice of every second one alone."""
    generator = torch.Generator().manual_seed(1)
    tokens_ND = torch.randn(num_tokens, router_ED.shape[1], generator=generator)
    if load == "skewed":
        tokens_ND[0::2] += SKEW * router_ED[0]
        tokens_ND[1::2] -= SKEW * router_ED[0]
    return tokens_ND


def make_layers(
    shape: dict[str, int], router_ED: Tensor, tokens_ND: Tensor
) -> dict[str, TimedLayer]:
    """The variants by name, on the tokens' device and of their dtype; the sparse ones are one.

    Args:
        shape: experts, top_k, width, hidden.
        router_ED: The router's weight.
        tokens_ND: What they are going to see.
    """
    context = context_of(shape["width"])
    dense = DenseFeedForwardConfig(hidden_size=shape["top_k"] * shape["hidden"])
    sparse = SparseMoEConfig(
        num_experts=shape["experts"], top_k=shape["top_k"], expert_hidden_size=shape["hidden"]
    )
    looping = sparse.model_copy(update={"experts": "loop"})
    ours: SparseMoE = start(SparseMoE, sparse, context, tokens_ND)
    loop: SparseMoE = start(SparseMoE, looping, context, tokens_ND)
    with torch.no_grad():
        _linear_score(ours).weight.copy_(router_ED)
        _linear_score(loop).weight.copy_(router_ED)
    return {
        "dense": of_ours(start(DenseFeedForward, dense, context, tokens_ND)),
        "polyad": of_ours(ours),
        REFERENCE: of_ours(loop),
        "deepspeed 1.25": _of_deepspeed(loop, 1.25),
        "deepspeed no drop": _of_deepspeed(loop, None),
    }


def rows_of_experts(layers: dict[str, TimedLayer], tokens_ND: Tensor) -> list[int]:
    """How many tokens use each expert."""
    module = layers["polyad"].module
    assert isinstance(module, SparseMoE)
    with torch.no_grad():
        ids_NK = module.router(tokens_ND.unsqueeze(0)).selected.expert_ids_NK
    rows_E = ids_NK.flatten().bincount(minlength=module.config.num_experts)
    return [int(rows) for rows in rows_E]


def _linear_score(layer: SparseMoE) -> LinearScore:
    assert isinstance(layer.router.score, LinearScore)
    return layer.router.score


def _of_deepspeed(reference: SparseMoE, capacity_factor: float | None) -> TimedLayer:
    """DeepSpeed's layer with the reference's weights."""
    up_EDF, down_EFD = reference.experts.up, reference.experts.down
    num_experts, width, hidden = up_EDF.shape
    expert = nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width)
    )
    layer = import_deepspeed().moe.layer.MoE(
        width,
        expert,
        num_experts=num_experts,
        k=reference.config.top_k,
        capacity_factor=capacity_factor or 1.0,
        drop_tokens=capacity_factor is not None,
        top2_2nd_expert_sampling=False,  # the second choice is the second highest score, as ours
    )
    layer.to(up_EDF.device, up_EDF.dtype)
    assert reference.experts.up_bias is not None
    assert reference.output_bias is not None
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(_linear_score(reference).weight)
        local = layer.deepspeed_moe.experts.deepspeed_experts
        for number, theirs in enumerate(local):
            theirs[0].weight.copy_(up_EDF[number].t())
            theirs[0].bias.copy_(reference.experts.up_bias[number])
            theirs[2].weight.copy_(down_EFD[number].t())
            theirs[2].bias.copy_(reference.output_bias[number])
    return TimedLayer(layer, lambda tokens_ND: layer(tokens_ND)[0])
