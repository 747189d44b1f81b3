"""Models of images: parameter counts of the papers, and what is refused."""

import pytest
from pydantic import ValidationError

from model.build import num_parameters, read_model_config

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


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "vit", "patch_size": 15}, "model.patch_size: 15 does not divide"),
        ({"kind": "vit", "patch_size": 15}, "nearest that do: 14, 16"),
        (
            S16 | {"channel_feed_forward": {"kind": "smoe", "graph": "attention"}},
            "model.channel_feed_forward.graph: attention is not allowed in a model without",
        ),
        (
            S16 | {"token_feed_forward": {"kind": "smoe", "graph": "attention"}},
            "model.token_feed_forward.graph: attention",
        ),
        (
            V_MOE | {"feed_forward": {"kind": "smoe", "placement": [8]}},
            "model.feed_forward.placement: [8] is not allowed",
        ),
        ({"kind": "vit", "num_heads": 7}, "model.hidden_size: 768 is not a multiple"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(section, message):
    with pytest.raises(ValidationError) as caught:
        read_model_config(section)
    assert message in str(caught.value)
