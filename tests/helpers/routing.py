"""Routed parts and models for tests, the definitions they are compared with, and the gate against
leaks.

Shapes: B batch, T tokens in a sequence, D width, E experts, A heads, H width of one head.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyad.model.attention import AttentionTrace
from polyad.model.build import materialize
from polyad.model.feedforward import FeedForwardContext
from polyad.model.mumoe.gating import Gate
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.router import TopK


def make_config(**overrides):
    """Six small experts; keywords override."""
    return SparseMoEConfig(**{"num_experts": 6, "expert_hidden_size": 10} | overrides)


def make_context(**overrides):
    """Width 12, three heads, biases; keywords override."""
    settings = {
        "hidden_size": 12,
        "num_heads": 3,
        "bias": True,
        "dropout": 0.0,
        "initializer_std": 0.3,
        "residual_std": 0.3,
    }
    return FeedForwardContext(**settings | overrides)


def scatter(module, scale=0.3, seed=1):
    """Moves parameters away from their initial values: biases count, nothing is uniform.

    A temperature stays: near zero it would make noise of everything.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in module.parameters() if p.numel() > 1):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.dtype), alpha=scale)
    return module


def make(part, config=None, context=None, dtype=torch.float64):
    """A part of a layer, or a layer, with scattered weights."""
    with torch.device("meta"):
        module = part(config or make_config(), context or make_context())
    materialize(module, seed=0, dtype=dtype)
    return scatter(module)


def make_trace(batch, length, heads, size, width, dtype=torch.float64, seed=2):
    """What attention might have done; every tensor asks for its gradient."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape, scale=1.0):
        value = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return value.to(dtype).requires_grad_()

    qkv = leaf(batch, length, 3, heads, size)
    return AttentionTrace(
        qkv,
        qkv.select(3, 0),
        leaf(batch, length, width),
        leaf(width, heads * size, scale=0.2),
        leaf(width),
    )


def asked_for(trace, head):
    """The trace of an attention that was asked for another head."""
    return trace._replace(of_head_BT3H=trace.qkv_BT3AH.select(3, head))


def leaves_of(trace):
    """What gradients can be asked of."""
    return [x for x in trace if x.is_leaf]


def seen_by(length, causal):
    """[T, T]: whether token i may know of token j."""
    whole = torch.ones(length, length, dtype=torch.bool)
    return whole.tril() if causal else whole


def similarity_matrix(u_BTD, config, causal):
    """S of the similarity graph, by its definition."""
    if config.similarity == "cosine":
        u_BTD = u_BTD / u_BTD.norm(dim=-1, keepdim=True)
    logits_BTT = u_BTD @ u_BTD.transpose(1, 2) / config.tau
    seen_TT = seen_by(u_BTD.shape[1], causal)
    return logits_BTT.masked_fill(~seen_TT, -torch.inf).softmax(-1)


def attention_matrix(trace, head, causal):
    """The attention of one head."""
    q_BTH, k_BTH = trace.q_BATH[:, head], trace.k_BATH[:, head]
    logits_BTT = q_BTH @ k_BTH.transpose(1, 2) / q_BTH.shape[-1] ** 0.5
    return logits_BTT.masked_fill(~seen_by(q_BTH.shape[1], causal), -torch.inf).softmax(-1)


def posterior_matrix(trace, head, config, causal):
    """S of the attention-aware graph, by its definition: prior times likelihood, normalized."""
    heads, size = trace.q_BATH.shape[1], trace.q_BATH.shape[-1]
    weight_DH = trace.output_weight_DM[:, head * size : (head + 1) * size]
    m_BTD = trace.v_BATH[:, head] @ weight_DH.T
    if config.head_mean:
        m_BTD = heads * m_BTD
    o_BTD = trace.output_BTD
    if trace.output_bias_D is not None:
        o_BTD = o_BTD - trace.output_bias_D
    distance_BTT = torch.cdist(o_BTD, m_BTD, compute_mode="donot_use_mm_for_euclid_dist")
    likelihood_BTT = torch.exp(-(distance_BTT**2) / (2 * config.sigma**2))
    joint_BTT = attention_matrix(trace, head, causal) * likelihood_BTT
    return joint_BTT / joint_BTT.sum(-1, keepdim=True)


def entropy_of(weights):
    """Entropy over the last dimension, in nats."""
    return -(weights * (weights + (weights == 0)).log()).sum(-1)


class Watch(TorchDispatchMode):
    """Sees the sizes of what every operation gives, those of the backward pass too."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


def logits_and_experts(model, ids_BT):
    """The logits, and of every routed block, in their order, the experts [B, T, K]; of a muMoE the
    coefficients [B, T, N] of each level.
    """
    chosen = []

    def keep(module, inputs, decided):
        many = decided.coefficients if isinstance(module, Gate) else [decided.expert_ids_NK]
        chosen.extend(each.unflatten(0, ids_BT.shape) for each in many)

    deciding = [m for m in model.modules() if isinstance(m, TopK | Gate)]
    hooks = [module.register_forward_hook(keep) for module in deciding]
    try:
        with torch.no_grad():
            return model(ids_BT).logits, chosen
    finally:
        for hook in hooks:
            hook.remove()


def assert_causal(model, ids_BT, last):
    """The gate: nothing up to a token depends on those after it.

    Changes the tokens after `last`, and then cuts them off: both times the experts of the tokens up
    to it are identical, and coefficients and logits agree.

    Args:
        model: A language model, in float64; experts by the loop.
        ids_BT: Token ids.
        last: The last token that stays.
    """
    kept = last + 1
    changed_BT = ids_BT.clone()
    changed_BT[:, kept:] = (changed_BT[:, kept:] + 1) % model.config.vocab_size
    logits, experts = logits_and_experts(model, ids_BT)
    for other_BT in (changed_BT, ids_BT[:, :kept]):
        other_logits, other_experts = logits_and_experts(model, other_BT)
        for block, (ours, theirs) in enumerate(zip(experts, other_experts, strict=True)):
            if ours.is_floating_point():
                torch.testing.assert_close(ours[:, :kept], theirs[:, :kept], atol=1e-10, rtol=0)
            else:
                same = torch.equal(ours[:, :kept], theirs[:, :kept])
                assert same, f"experts of routed block {block}"
        torch.testing.assert_close(other_logits[:, :kept], logits[:, :kept], atol=1e-10, rtol=0)


def leaves(batch, length, width=12, experts=6, dtype=torch.float64):
    """Scores r and tokens u that ask for their gradients."""
    r_BTE = (2 * torch.randn(batch, length, experts, dtype=torch.float64)).softmax(-1)
    u_BTD = torch.randn(batch, length, width, dtype=torch.float64)
    return tuple(x.to(dtype).requires_grad_() for x in (r_BTE, u_BTD))


def assert_same_with_gradients(ours, theirs, inputs):
    """Values and the gradients of all inputs, of a loss that weighs every element differently."""
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-9)
    weights = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad((ours * weights).sum(), inputs, retain_graph=True),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        assert other.abs().max() > 1e-6
        torch.testing.assert_close(mine, other, atol=1e-9, rtol=1e-7)
