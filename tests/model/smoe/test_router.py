"""The router: any score with any graph; scores against numbers worked out by hand; what may be
configured; and copies of a dense feed-forward."""

from functools import partial

import pytest
import torch

from polyad.model.build import build_model
from polyad.model.decoder import GPT2Config
from polyad.model.feedforward import BlockInput
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.experts import copies
from polyad.model.smoe.graph import GRAPHS
from polyad.model.smoe.layer import SparseMoE
from polyad.model.smoe.router import (
    SCORES,
    CosineScore,
    ProductInFp32,
    RandomScore,
    make_router,
)
from tests.helpers.random_model import built
from tests.helpers.routing import make, make_config, make_context, make_trace
from tests.helpers.sections import section_of

every_score = pytest.mark.parametrize("score", SCORES)
every_graph = pytest.mark.parametrize("graph", GRAPHS)


@every_score
@every_graph
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_any_score_goes_with_any_graph(score, graph, top_k):
    config = make_config(score=score, graph=graph, top_k=top_k)
    router = make(make_router, config)
    u_BTD = torch.randn(2, 9, 12, dtype=torch.float64)
    trace = make_trace(9)
    (weights_NK, expert_ids_NK, *_), stats = router(u_BTD, BlockInput(attention=trace))
    # The parts, one after the other.
    r_BTE = router.score(u_BTD.flatten(0, 1)).softmax(-1).unflatten(0, (2, 9))
    p_NE = router.graph(r_BTE, u_BTD, BlockInput(attention=trace)).scores_BTE.flatten(0, 1)
    torch.testing.assert_close(p_NE.sum(-1), torch.ones(18, dtype=torch.float64))
    highest = p_NE.topk(top_k)
    assert torch.equal(expert_ids_NK, highest.indices)
    total = highest.values.sum(-1, keepdim=True) if top_k > 1 else 1.0
    torch.testing.assert_close(weights_NK, highest.values / total)
    share_E = expert_ids_NK.flatten().bincount(minlength=6).double() / expert_ids_NK.numel()
    r_NE = r_BTE.flatten(0, 1)  # before the graph
    variation = r_NE.sum(0).std(correction=0) / r_NE.sum(0).mean()
    z_loss = router.score(u_BTD.flatten(0, 1)).logsumexp(-1).square().mean()
    torch.testing.assert_close(stats.load_E, share_E)
    torch.testing.assert_close(stats.losses["balance_loss"], 6 * (share_E * p_NE.mean(0)).sum())
    torch.testing.assert_close(stats.losses["z_loss"], z_loss)
    torch.testing.assert_close(stats.losses["importance_loss"], variation**2)
    assert stats.losses.get("load_loss") is None  # there is no noise
    torch.testing.assert_close(stats.measures["entropy"], -(p_NE * p_NE.log()).sum(-1).mean())
    assert not stats.measures["entropy"].requires_grad
    assert (stats.measures.get("effective_neighbours") is None) == (graph == "none")
    assert (stats.measures.get("head_entropy_A") is None) == (graph != "attention")
    assert (stats.measures.get("attention_head") is None) == (graph != "attention")


@every_graph
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_routing_is_fp32_in_a_bf16_model_and_float64_in_a_float64_one(graph, dtype):
    router = make(make_router, make_config(graph=graph, balancing_rate=0.1), dtype=dtype)
    expected = torch.promote_types(dtype, torch.float32)
    trace = make_trace(9, dtype=dtype)
    selected, stats = router(torch.randn(2, 9, 12, dtype=dtype), BlockInput(attention=trace))
    assert selected.weights_NK.dtype == expected
    for name, value in stats.tensors().items():
        assert value.dtype == (torch.int64 if name == "attention_head" else expected), name


def test_a_product_of_bf16_factors_is_that_of_their_copies_in_fp32():
    u_ND, weight_ED = (torch.randn(rows, 12).bfloat16().requires_grad_() for rows in (9, 6))
    logits_NE, gradient_NE = ProductInFp32.apply(u_ND, weight_ED), torch.randn(9, 6)
    assert torch.equal(logits_NE, u_ND.float() @ weight_ED.float().t())
    logits_NE.backward(gradient_NE)
    wanted = gradient_NE.double() @ weight_ED.double(), gradient_NE.double().t() @ u_ND.double()
    for factor, exact in zip((u_ND, weight_ED), wanted, strict=True):
        torch.testing.assert_close(factor.grad.double(), exact, rtol=2**-8, atol=1e-3)


def test_gradients_of_a_product_in_fp32_keep_more_than_bf16_holds():
    u_ND, weight_ED = (torch.ones(2, 1).bfloat16().requires_grad_() for _ in range(2))
    # In bf16 1 + 2^-10 is 1, and both sums would be 0.
    ProductInFp32.apply(u_ND, weight_ED).backward(torch.tensor([[1 + 2**-10, -1.0], [-1.0, 1.0]]))
    assert u_ND.grad.tolist() == [[2**-10], [0.0]]
    assert weight_ED.grad.tolist() == [[2**-10], [0.0]]


@every_graph
def test_update_reaches_the_balancing_bias_k_and_the_head(graph):
    config = make_config(graph=graph, balancing_rate=0.1, top_k=1, final_top_k=4)
    layer = make(SparseMoE, config, dtype=torch.float32)
    trace = make_trace(9, dtype=torch.float32)
    u_BTD, router = torch.randn(2, 9, 12), layer.router
    before = {name: buffer.clone() for name, buffer in router.named_buffers()}
    _, stats = layer(u_BTD, u_BTD, BlockInput(attention=trace))
    for name, buffer in router.named_buffers():
        assert torch.equal(buffer, before[name]), name
    layer.update(stats, progress=0.5)
    for name, buffer in router.named_buffers():
        assert not torch.equal(buffer, before[name]), name
    selected, _ = router(u_BTD, BlockInput(attention=trace))
    assert selected.expert_ids_NK.shape == (18, 3)


def fill(parameter, values):
    with torch.no_grad():
        parameter.copy_(torch.tensor(values, dtype=parameter.dtype))


def test_cosine_equals_numbers_worked_out_by_hand():
    config = make_config(num_experts=3, score="cosine", score_width=2)
    score = make(CosineScore, config, make_context(hidden_size=2))
    fill(score.projection, [[2.0, 0.0], [0.0, 2.0]])
    fill(score.embedding, [[3.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    u_ND = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    # The direction of u is (0.6, 0.8), which neither the projection's 2 nor the length 5 changes;
    # the third expert's is (1, 1) / sqrt(2): 1.4 / 1.4142136 = 0.9899495.
    cosines = torch.tensor([[0.6, 0.8, 0.9899495]], dtype=torch.float64)
    for temperature, divisor in ((0.5, 0.5), (2.0, 2.0), (-1.0, 0.01)):  # kept from zero
        fill(score.temperature, temperature)
        torch.testing.assert_close(score(u_ND), cosines / divisor, atol=1e-5, rtol=0)
    torch.testing.assert_close(score(7 * u_ND), score(u_ND))


def test_cosine_starts_at_the_temperature_of_its_paper(small_model):
    model = small_model(feed_forward={"kind": "smoe", "score": "cosine"})
    temperature = model.blocks[0].feed_forward.router.score.temperature
    torch.testing.assert_close(temperature.item(), 0.07, atol=1e-6, rtol=0)


def test_random_is_frozen_and_equals_its_weight_times_the_token():
    score = make(RandomScore, make_config(num_experts=3), make_context(hidden_size=4))
    assert list(score.parameters()) == []
    # Uniform as PyTorch starts a linear layer of 4 inputs: within 1 / sqrt(4).
    assert score.weight.abs().max() <= 0.5
    assert score.weight.abs().max() > 0.25
    u_ND = torch.tensor([[1.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    expected = score.weight[:, 0] + 2 * score.weight[:, 3]
    torch.testing.assert_close(score(u_ND)[0], expected.double())


def test_random_weight_depends_on_seed_and_place_and_is_fp32_in_any_model(small_config):
    def weights(seed, dtype):
        model = built(
            small_config(feed_forward={"kind": "smoe", "score": "random"}), seed=seed, dtype=dtype
        )
        return [block.feed_forward.router.score.weight for block in model.blocks]

    ours, again, other = weights(0, torch.float32), weights(0, torch.bfloat16), weights(1, None)
    assert torch.equal(ours[0], again[0])
    assert again[0].dtype == torch.float32
    assert not torch.equal(ours[0], ours[1])
    assert not torch.equal(ours[0], other[0])


@every_score
def test_scores_are_computed_in_fp32_at_least(score):
    config, u_ND = make_config(score=score), torch.randn(5, 12)
    exact = make(SCORES[score], config, dtype=torch.float64)(u_ND.bfloat16().double())
    assert exact.dtype == torch.float64
    layer = make(SparseMoE, config, dtype=torch.bfloat16)
    logits = layer.router.score(u_ND.bfloat16())
    assert logits.dtype == torch.float32
    # The bf16 layer's own weights, in float64: equal but for fp32 rounding, not for bf16's.
    layer = layer.double()
    exact = layer.router.score(u_ND.bfloat16().double())
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)


parse = partial(section_of, "smoe")


def test_pools_are_of_the_prefix_in_a_language_model_and_of_documents_elsewhere():
    assert parse("pool=prefix").model.feed_forward.pool_bounds() == (2, 16)
    assert parse("pool=prefix", "pool_least=4").model.feed_forward.pool_bounds() == (4, 16)
    SparseMoEConfig(pool="document").check_model(num_layers=4, num_heads=4, causal=False)
    with pytest.raises(ValueError, match=r"pool: prefix is not allowed in a model whose tokens se"):
        SparseMoEConfig(pool="prefix").check_model(num_layers=4, num_heads=4, causal=False)


def test_a_model_with_pools_has_to_know_where_documents_end():
    pooled = GPT2Config(vocab_size=100, feed_forward={"kind": "smoe", "pool": "prefix"})
    assert pooled.left_to_data() == "model.end_of_text_id"
    with pytest.raises(ValueError, match=r"^model\.end_of_text_id is not set: give a number, or"):
        build_model(pooled)
    assert pooled.model_copy(update={"end_of_text_id": 3}).left_to_data() is None
    # A sequence that is scored as a whole is one document.
    head = {"kind": "classification", "num_classes": 3}
    fields = {"vocab_size": 100, "head": head, "feed_forward": {"kind": "smoe", "pool": "prefix"}}
    assert GPT2Config.model_validate(fields).left_to_data() is None


def test_noise_is_a_share_of_the_deviation_and_of_each_expert_its_own():
    # Values 3 +- 2: their standard deviation is 2, whatever their mean.
    value = torch.tensor([1.0, 5.0]).repeat(100, 100)
    added = copies(value, 3, 0.05, 7, "up") - value
    for noise in added:
        assert noise.std().item() == pytest.approx(0.1, rel=0.02)  # of 20,000 draws: 0.5%
        assert noise.mean().item() == pytest.approx(0, abs=0.004)
    assert all(
        abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.04
        for a, b in [(added[0], added[1]), (added[0], added[2]), (added[1], added[2])]
    )
