"""LoRA on one device: what is added, to which weights, and what becomes of it when it is merged."""

import pytest
import torch
from torch import nn

from polyad.model.bert import BertConfig
from polyad.model.build import build_model, materialize, matrix_dimensions
from polyad.model.config import PatternError
from polyad.model.initialization import ZEROS
from polyad.model.layers import Linear
from polyad.model.lora import LoRAConfig, LowRank, adapters, add_lora, of_base
from polyad.model.vit import ViTConfig
from tests.helpers.small_decoders import small_decoder
from tests.helpers.training import MODEL, moe_model, mumoe_model

LINEAR = ("attention.qkv", "attention.projection", "feed_forward.up", "feed_forward.down")
EVERYTHING = LoRAConfig(rank=3, alpha=6.0, targets=("attention.*", "feed_forward.*"), experts=True)
DENSE = LoRAConfig(rank=3, alpha=6.0, targets=("attention.*", "feed_forward.*"))
FACTORS = ("feed_forward.up.*_factor", "feed_forward.down.*_factor", "attention.qkv")
VIT = ViTConfig(
    image_size=8, patch_size=4, num_layers=2, hidden_size=16, num_heads=2, num_classes=3
)
KINDS = {
    "dense": (MODEL, LoRAConfig(rank=3, alpha=6.0, targets=LINEAR)),
    "vit": (VIT, LoRAConfig(rank=3, alpha=6.0, targets=LINEAR, trained=("head.*",))),
    "smoe": (moe_model(), LoRAConfig(rank=4, alpha=2.0, experts=True)),
    "bert": (
        BertConfig(num_layers=2, hidden_size=16, num_heads=2, sequence_length=17, vocab_size=61),
        LoRAConfig(rank=3, alpha=6.0, targets=LINEAR, trained=("head.*",)),
    ),
    "exact": (moe_model(activation="gelu"), LoRAConfig(rank=4, alpha=2.0, experts=True)),
    "graph": (moe_model(graph="attention"), LoRAConfig(rank=4, alpha=2.0, targets=LINEAR[:2])),
    **{
        kind: (mumoe_model(factorization=kind, expert_rank=3), LoRAConfig(rank=3, targets=FACTORS))
        for kind in ("cp", "tr", "tt", "tucker")
    },
    "one head of keys": (small_decoder("one head of keys"), DENSE),
    **{
        kind: (small_decoder(kind), EVERYTHING)
        for kind in ("norm over heads", "latent", "sinks", "multipliers")
    },
}


def adapted_model(kind):
    """A model with adapters and one without, with equal weights."""
    config, lora = KINDS[kind]
    plain, model = build_model(config), build_model(config)
    add_lora(model, lora)
    for each in (plain, model):
        materialize(each, seed=3)
        if kind == "vit":  # whose head starts as zeros
            nn.init.eye_(each.get_parameter("head.weight"))
    return plain.eval(), model.eval()


def some_input(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "vit":
        return torch.randn(4, 3, 8, 8, generator=generator)
    return torch.randint(61, (3, 17), generator=generator)


def test_what_is_added_is_alpha_over_rank_times_b_a_x():
    adapted = Linear(2, 2, ZEROS, bias=False)
    adapted.lora = LowRank(adapted.weight, LoRAConfig(rank=1, alpha=3.0))
    with torch.no_grad():
        adapted.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        adapted.lora.A.copy_(torch.tensor([[1.0, 2.0]]))
        adapted.lora.B.copy_(torch.tensor([[10.0], [-1.0]]))
    # By hand: x = (1, 1), A x = 3, B A x = (30, -3), times 3 / 1; W x = (1, 1).
    torch.testing.assert_close(adapted(torch.ones(1, 2)), torch.tensor([[91.0, -8.0]]))
    torch.testing.assert_close(adapted.merged_weight(), torch.tensor([[31.0, 60.0], [-3.0, -5.0]]))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_alone_learn_and_merged_weights_compute_the_same(kind):
    plain, model = adapted_model(kind)
    x = some_input(kind)
    before, logits = plain(x).logits.detach(), model(x).logits
    torch.testing.assert_close(logits, before, rtol=1e-6, atol=1e-6)
    logits.square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in model.named_parameters() if p.grad is not None} <= trained
    own = {f"{path}.{matrix}" for _, path, _ in adapters(model) for matrix in "AB"}
    assert trained - own == {name for name in trained if name.startswith("head.")}
    assert bool(trained - own) == (kind in ("vit", "bert"))
    weights = dict(plain.named_parameters())
    assert of_base(model) == weights.keys() - trained
    if kind == "latent":  # every matrix of a decoder can be adapted
        left = {name for name in weights.keys() - trained if weights[name].dim() > 1}
        adapted = {weight for weight, *_ in adapters(model)}
        assert left - adapted == {"token_embedding.weight", "head.weight"}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight, path, adapter in adapters(model):
            if kind == "dense":  # peft's Kaiming uniform with a = sqrt(5): at most 1 / sqrt(inputs)
                inputs = adapter.A.shape[-1]
                assert 0.9 / inputs**0.5 < adapter.A.abs().max() <= 1 / inputs**0.5, path
            # B is zero, so that the gradient of A is, too, and that of B is not.
            assert adapter.A.grad is None or not adapter.A.grad.any()
            assert adapter.B.grad.any()
            adapter.B.normal_(0, 0.3, generator=generator)
            weights[weight] += adapter.delta(adapter.A, adapter.B)
        expected, logits = plain(x).logits, model(x).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (logits - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grouped", "query key value projection"),
        ("latent", "query_down query_up key_value_down key_value_up projection"),
        ("latent without rank", "query key_value_down key_value_up projection"),
    ],
)
def test_the_default_is_attention_of_every_decoder(name, expected):
    model = build_model(small_decoder(name))
    add_lora(model, LoRAConfig(rank=3))
    assert {weight for weight, *_ in adapters(model)} == {
        f"blocks.{block}.attention.{layer}.weight" for block in (0, 1) for layer in expected.split()
    }


@pytest.mark.parametrize("precision", ["fp32", "model"])
def test_a_router_in_bf16_adds_in_its_own_precision(precision):
    config = small_decoder("norm over heads")
    section = config.feed_forward.model_copy(update={"router_dtype": precision})
    model = build_model(config.model_copy(update={"feed_forward": section}))
    add_lora(model, LoRAConfig(rank=3, targets=("router.score",)))
    materialize(model, seed=3, dtype=torch.bfloat16)
    score = model.blocks[0].feed_forward.router.score
    torch.nn.init.normal_(score.lora.B, std=0.3)
    u = torch.randn(50, 36, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        logits = score(u)
        exact = u.double() @ score.lora.delta(score.lora.A.double(), score.lora.B.double()).T
        score.lora = None
        plain = score(u)
    assert logits.dtype == torch.float32
    rounding = 1e-6 if precision == "fp32" else 0.02
    assert (logits - plain - exact).abs().max() < rounding * exact.abs().max()


def test_matrices_of_experts_decay_as_matrices():
    _, model = adapted_model("smoe")
    dimensions = matrix_dimensions(model)
    assert {dimensions[f"{path}.{m}"] for _, path, _ in adapters(model) for m in "AB"} == {2}


# What is refused, and what is named: the key with its value, and what would fit.
@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (MODEL, {"targets": ["attn.qkv"]}, ("'attn.qkv'", "attention")),
        (MODEL, {"targets": ["experts.up"]}, ("adapt.lora.targets: 'experts.up'",)),
        (MODEL, {"targets": []}, ("targets", "experts")),
        (MODEL, {"experts": True}, ("adapt.lora.experts: true",)),
        (MODEL, {"trained": ["haed.*"]}, ("adapt.lora.trained: 'haed.*'",)),
        (MODEL, {"rank": 36}, ("adapt.lora.rank: 36", "blocks.0")),
        (mumoe_model(), {"targets": ["up.input_factor"], "rank": 7}, ("blocks.0.feed_f",)),
        (mumoe_model(), {"targets": ["feed_forward.up"]}, ("feed_forward.up.input_fac",)),
    ],
    ids=str,
)
def test_what_does_nothing_is_an_error(config, change, named):
    with pytest.raises(PatternError) as raised:
        add_lora(build_model(config), LoRAConfig.model_validate(change))
    (line,) = str(raised.value).splitlines()
    assert all(word in line for word in named), line
    assert raised.value.exit_status == 2
