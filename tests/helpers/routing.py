"""Routed parts and models for tests, and the gate against leaks.

Shapes: B batch, T tokens in a sequence, D width, E experts, A heads, H width of one head.
"""

import torch

from polyad.model.attention import AttentionTrace
from polyad.model.feedforward import FeedForwardContext
from polyad.model.mumoe.gating import Gate
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.router import TopK
from tests.helpers.random_model import drawn


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
    config, context = config or make_config(), context or make_context()
    return scatter(drawn(lambda: part(config, context), dtype=dtype))


def make_trace(length, dtype=torch.float64):
    """What attention with three heads of width 4 may have done in two sequences of width 12. Every
    tensor asks for its gradient."""
    generator = torch.Generator().manual_seed(2)

    def leaf(*shape, scale=1.0):
        value = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return value.to(dtype).requires_grad_()

    qkv = leaf(2, length, 3, 3, 4)
    output, weight = leaf(2, length, 12), leaf(12, 12, scale=0.2)
    return AttentionTrace(qkv, qkv.select(3, 0), output, weight, leaf(12))


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


def assert_same_with_gradients(ours, theirs, inputs, least=1e-6):
    """Values and the gradients of all inputs, of a loss that weighs every element differently.

    Args:
        ours: In float64.
        theirs: The same by other means.
        inputs: What both depend on.
        least: What the largest number of each gradient has to be above.
    """
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-9)
    weights = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad((ours * weights).sum(), inputs, retain_graph=True),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        assert other.abs().max() > least
        torch.testing.assert_close(mine, other, atol=1e-9, rtol=1e-7)
