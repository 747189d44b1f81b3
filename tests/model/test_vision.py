"""Models of images: parameter counts of the papers, and what is refused."""

import pytest
import torch

from polyad.model.build import (
    build_model,
    count_parameters,
    materialize,
    num_parameters,
    read_model_config,
)

S16 = {"kind": "mixer", "num_classes": 1000}
B16 = S16 | {
    "num_layers": 12,
    "hidden_size": 768,
    "token_feed_forward": {"kind": "dense", "hidden_size": 384},
}
V_MOE = {
    "kind": "vit", "patch_size": 32, "num_layers": 8, "hidden_size": 512, "num_heads": 8,
    "num_classes": 1000,
}  # fmt: skip


def mumoe(factorization, rank, experts, hidden):
    return {
        "kind": "mumoe", "factorization": factorization, "num_experts": experts, "rank": rank,
        "hidden_size": hidden, "gate_norm": "batch", "gate_input": "normalized",
    }  # fmt: skip


def factorized_mixer(factorization, ranks, experts):
    tokens, channels = ranks
    return S16 | {
        "token_feed_forward": mumoe(factorization, tokens, experts, 256),
        "channel_feed_forward": mumoe(factorization, channels, experts, 2048),
    }


def sparse_vit(experts):
    return V_MOE | {"feed_forward": {"kind": "smoe", "num_experts": experts, "placement": [5, 7]}}


@pytest.mark.parametrize(
    ("section", "parameters"),
    [
        (S16, 18_528_264),  # timm's mixer_s16_224
        (B16, 59_880_472),  # timm's mixer_b16_224
        (factorized_mixer("cp", (147, 384), [64]), 18_630_616),
        (factorized_mixer("tr", (37, 97), [64]), 18_290_792),
        (factorized_mixer("tr", (38, 99), [64, 2]), 18_659_944),
        (factorized_mixer("cp", (147, 384), [64, 2]), 18_658_936),
        (
            {"kind": "vit", "num_classes": 1000, "hidden_size": 384, "num_heads": 6},
            22_050_664,  # timm's vit_small_patch16_224
        ),
        (V_MOE, 27_332_584),
        (sparse_vit(8), 56_736_760),
        (sparse_vit(16), 90_340_360),
        (sparse_vit(32), 157_547_560),
        (sparse_vit(64), 291_961_960),
    ],
)
def test_models_have_the_published_number_of_parameters(section, parameters):
    assert num_parameters(read_model_config(section)) == parameters


def test_a_mixer_of_whole_experts_would_have_a_billion():
    # 64 dense feed-forwards in each place, and linear gates: only counted, never built.
    blocks = num_parameters(read_model_config(S16)) - 924_136
    assert 64 * blocks + 8 * 64 * (196 + 512) == 1_127_026_688


HEADS = [
    ({"kind": "linear"}, 768, 1000, 769_000),
    ({"kind": "mumoe", "rank": 393}, 768, 1000, 769_521),
    ({"kind": "mumoe", "factorization": "tr", "rank": 102}, 768, 1000, 771_928),
    ({"kind": "mumoe", "num_experts": [128], "rank": 512}, 768, 40, 578_048),
]


@pytest.mark.parametrize(("head", "width", "classes", "parameters"), HEADS)
def test_heads_have_the_papers_number_of_parameters(head, width, classes, parameters):
    sizes = {"hidden_size": width, "num_layers": 1, "patch_size": 32, "num_classes": classes}
    model = build_model(read_model_config({"kind": "vit", "head": head} | sizes))
    assert count_parameters(model.head) == parameters


def test_a_head_matches_a_linear_one_and_is_the_sum_of_its_experts():
    section = {
        "kind": "vit", "image_size": 8, "patch_size": 4, "num_layers": 1, "hidden_size": 16,
        "num_heads": 2, "num_classes": 30, "head": {"kind": "mumoe", "num_experts": [5]},
    }  # fmt: skip
    model = build_model(read_model_config(section))
    linear = 17 * 30
    rows = 5 + 17 + 30
    assert abs(count_parameters(model.head) - linear) <= rows / 2 + 5 * 16
    materialize(model, 0)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.gate.weight)
    z = torch.randn(4, 16)
    logits, stats = model.head(z)
    a = model.head.gate(z).coefficients[0]
    u1, u2, u3 = (
        model.head.layer.get_parameter(f"{name}_factor{suffix}")
        for name, suffix in (("expert", "_0"), ("input", ""), ("output", ""))
    )
    # Every expert's matrix is built, with its bias as the row of a constant input.
    w = torch.einsum("nr,ir,ro->nio", u1, u2, u3)
    with_one = torch.cat([z, torch.ones(4, 1)], dim=1)
    expected = torch.einsum("bn,nio,bi->bo", a, w, with_one)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert stats.name == "head"
    assert model(torch.randn(2, 3, 8, 8)).routing[-1].name == "head"
